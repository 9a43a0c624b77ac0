// SPDX-License-Identifier: Apache-2.0
// cpx: context-parallel exchange. Everything on the host that needs no third-party library.
#pragma once

#include <cpx/core/activation.hpp>
#include <cpx/core/config.hpp> // version
#include <cpx/core/element.hpp>
#include <cpx/core/element_name.hpp>
#include <cpx/core/elements.hpp>
#include <cpx/core/error.hpp>
#include <cpx/core/extent.hpp>
#include <cpx/core/field.hpp>
#include <cpx/core/function_ref.hpp>
#include <cpx/core/given_rows.hpp>
#include <cpx/core/hash.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/memory.hpp>
#include <cpx/core/overlap.hpp>
#include <cpx/core/packing.hpp>
#include <cpx/core/refused.hpp>
#include <cpx/core/rotary_axes.hpp>
#include <cpx/core/row_buffer.hpp>
#include <cpx/core/rows.hpp>
#include <cpx/core/search.hpp>
#include <cpx/core/thd.hpp>

#include <cpx/layout/algorithm.hpp>
#include <cpx/layout/concept.hpp>
#include <cpx/layout/cut.hpp>
#include <cpx/layout/either.hpp>
#include <cpx/layout/head_sharded.hpp> // and replicated
#include <cpx/layout/piecewise.hpp>
#include <cpx/layout/sequence_parallel.hpp>
#include <cpx/layout/sequential.hpp>
#include <cpx/layout/sharded.hpp>
#include <cpx/layout/sharding.hpp>
#include <cpx/layout/striped.hpp>
#include <cpx/layout/table.hpp>
#include <cpx/layout/tensor.hpp>
#include <cpx/layout/zigzag.hpp>

#include <cpx/mesh/mesh.hpp>

#include <cpx/plan/capacity.hpp>
#include <cpx/plan/carry.hpp>
#include <cpx/plan/edges.hpp>
#include <cpx/plan/global_rows.hpp>
#include <cpx/plan/halo.hpp>
#include <cpx/plan/media.hpp>
#include <cpx/plan/mrope.hpp>
#include <cpx/plan/parcel.hpp>
#include <cpx/plan/relayout.hpp>
#include <cpx/plan/route.hpp>
#include <cpx/plan/run_list.hpp>
#include <cpx/plan/traffic.hpp>

#include <cpx/transport/agree.hpp>
#include <cpx/transport/exchange.hpp>
#include <cpx/transport/gather.hpp>
#include <cpx/transport/movement.hpp>
#include <cpx/transport/subgroup.hpp>
#include <cpx/transport/sum.hpp>
#include <cpx/transport/threads.hpp>
#include <cpx/transport/transport_ref.hpp>
