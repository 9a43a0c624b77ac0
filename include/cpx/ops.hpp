// SPDX-License-Identifier: Apache-2.0
// The host operators of cpx, with Eigen inside.
#pragma once

#include <cpx/ops/attention_backward.hpp>
#include <cpx/ops/attention_cache.hpp>
#include <cpx/ops/balance_loss.hpp>
#include <cpx/ops/causal_conv1d.hpp>
#include <cpx/ops/decode.hpp>
#include <cpx/ops/eigen.hpp>
#include <cpx/ops/expert_exchange.hpp>
#include <cpx/ops/gated_delta_net_backward.hpp>
#include <cpx/ops/gated_delta_rule_backward.hpp>
#include <cpx/ops/local/kimi_delta.hpp>
#include <cpx/ops/local/linear.hpp>
#include <cpx/ops/local/linear_attention.hpp>
#include <cpx/ops/local/moe_backward.hpp>
#include <cpx/ops/local/norm.hpp>
#include <cpx/ops/mrope.hpp>
#include <cpx/ops/recurrence.hpp>
#include <cpx/ops/rotary.hpp>
#include <cpx/ops/shift_rows.hpp>
#include <cpx/ops/token_loss.hpp>
#include <cpx/ops/vision.hpp>
