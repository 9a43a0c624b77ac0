// SPDX-License-Identifier: Apache-2.0
// Rows of tokens on devices to the ranks that own the experts which they chose, and back.
#include "group.hpp"

#include <cpx/ops/cuda/expert_exchange.hpp>

namespace binding {

namespace {

class shared_experts final : public device_experts {
public:
    shared_experts(device_group& g, tensor const& chosen, index_t experts, std::vector<index_t> const& places)
        : group_(g), stream_(g.waited("expert_exchange").stream()),
          made_(rows_of<index_t>(chosen), experts, places, g.comm()), lists_(lists_of(made_)) {}

    expert_lists const& lists() const override { return lists_; }
    void to_experts(tensor const& x, tensor const& out) override {
        run(x, out, [&]<class T>(cpx::rows<T const> from, cpx::rows<T> to) {
            auto const here = cpx::caller::here();
            cpx::detail::require_shape(x.where, "out", to, made_.count(), to.width(), here);
            auto const rows = made_.template to_experts<T>(from, to.width());
            auto const bytes = static_cast<std::size_t>(made_.count() * to.width()) * sizeof(T);
            cuda::check(cudaMemcpyAsync(to.data(), rows.view().data(), bytes, cudaMemcpyDeviceToDevice, stream_),
                        "cudaMemcpyAsync");
        });
    }
    void to_tokens(tensor const& x, tensor const& out) override {
        run(x, out, [&]<class T>(cpx::rows<T const> from, cpx::rows<T> to) { made_.template to_tokens<T>(from, to); });
    }

private:
    template <class F>
    void run(tensor const& x, tensor const& out, F&& f) {
        on_device const here(group_.nccl().device());
        with_type<float, __nv_bfloat16, __half>(x, [&]<class T>(as<T>) {
            auto const from = rows_of<T>(x);
            auto const to = rows_to<T>(out);
            for (auto const& [t, rows] : {std::pair(&x, from), std::pair(&out, cpx::rows<T const>(to))})
                if (rows.count() > 1 && rows.stride() != rows.width())
                    throw cpx::error(t->where, std::string("memory of ") + t->name,
                                     "rows one behind the other, on devices", "other strides; copy it first");
            cpx::require(group_.waited(x.where).stream() == stream_, x.where, "current stream",
                         "the one in which it was made", "another");
            f(from, to);
        });
    }

    device_group& group_;
    cudaStream_t stream_;
    cpx::expert_exchange<cuda::communicator> made_;
    expert_lists lists_;
};

} // namespace

std::unique_ptr<device_experts> share_on(device_group& g, tensor const& chosen, index_t experts,
                                         std::vector<index_t> const& places) {
    on_device const here(g.nccl().device());
    return std::make_unique<shared_experts>(g, chosen, experts, places);
}

} // namespace binding
