// SPDX-License-Identifier: Apache-2.0
// Uses what the components ops and model add to cpx.
#include <cpx/cpx.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/ops.hpp>

#include <Eigen/Core>
#include <nlohmann/json.hpp>

int main() { return nlohmann::json(Eigen::Vector2i(1, -1).sum()).get<int>(); }
