// SPDX-License-Identifier: Apache-2.0
// Positions of images and videos of ranks on devices, and their features at placeholders.
#include "group.hpp"

#include "../positions.hpp"

#include <cpx/ops/cuda/vision.hpp>

namespace binding {

namespace {

constexpr char const* where = "mrope_positions";

template <class S>
class positions_of final : public device_positions {
public:
    positions_of(device_group& g, placed_rows rows)
        : group_(g), rows_(std::move(rows)), stream_(g.comm().stream()),
          at_(std::make_shared<placeholders const>(std::get<cpx::sharded_positions<S>>(rows_.real),
                                                   g.comm().memory())) {}

    placed_rows const& rows() const override { return rows_; }
    std::vector<index_t> deltas() const override {
        on_device const here(group_.nccl().device());
        return std::get<cpx::sharded_positions<S>>(rows_.real).deltas(group_.waited(where));
    }
    void run(feature_step step, cpx::media_kind kind, tensor const& x, tensor const& features) const override {
        on_device const here(group_.nccl().device());
        auto& comm = group_.comm();
        with_type<float, __nv_bfloat16, __half>(
            x, [&]<class T>(as<T>) { run_step(step, *at_, kind, rows_to<T>(x), rows_to<T>(features), comm.memory()); });
        if (comm.stream() != stream_ && !is_capturing(comm.stream())) // whose memory would not wait for this one
            comm.keep(std::make_unique<std::shared_ptr<placeholders const>>(at_));
    }

private:
    using placeholders = cuda::placeholder_rows<S>;

    device_group& group_;
    placed_rows rows_;
    cudaStream_t stream_;
    std::shared_ptr<placeholders const> at_;
};

} // namespace

std::unique_ptr<device_positions> place_on(device_group& g, cpx::media const& m, any_layout const& sharding,
                                           tensor const& ids, cpx::media_tokens const& tokens) {
    on_device const here(g.nccl().device());
    std::unique_ptr<device_positions> made;
    with_type<std::int64_t, std::int32_t>(ids, [&]<class T>(as<T>) {
        auto rows = place(m, sharding, rows_of<T>(ids), tokens, g.waited(where));
        if (sharding.every_row())
            made = std::make_unique<positions_of<any_rows>>(g, std::move(rows));
        else
            made = std::make_unique<positions_of<any_tokens>>(g, std::move(rows));
    });
    return made;
}

} // namespace binding
