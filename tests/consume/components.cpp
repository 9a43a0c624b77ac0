// SPDX-License-Identifier: Apache-2.0
// Uses what the components ops and model add to cpx.
#include <cpx/model/json.hpp>
#include <cpx/ops/eigen.hpp>

#include <Eigen/Core>
#include <nlohmann/json.hpp>

int main() { return nlohmann::json(Eigen::Vector2i(1, -1).sum()).get<int>(); }
