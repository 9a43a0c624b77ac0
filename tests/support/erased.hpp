// SPDX-License-Identifier: Apache-2.0
// Any sharding behind one type, so that tests of all pairs compile one relayout and not hundreds.
#pragma once

#include <cpx/core/function_ref.hpp>
#include <cpx/layout/sharding.hpp>

#include <memory>
#include <vector>

namespace support {

/// A sharding that asks a real one, hidden behind it, and knows of it only what `cpx::any_sharding` promises.
///
/// Its pieces and rows are asked for once, for exhaustive tests make many plans of one sharding.
template <bool EveryRow>
class erased {
public:
    static constexpr bool every_row = EveryRow;

    template <class S>
        requires(!std::same_as<S, erased>) && cpx::any_sharding<S> && (S::every_row == EveryRow)
    erased(S sharding) : real_(std::make_shared<model<S>>(std::move(sharding))) {}

    /// Copies are equal.
    friend bool operator==(erased const& a, erased const& b) { return a.real_ == b.real_; }

    int ranks() const { return real_->ranks(); }
    cpx::thd const& batch() const { return real_->batch(); }
    cpx::index_t rows(int rank) const {
        auto const r = static_cast<std::size_t>(rank);
        return r < real_->counts.size() ? real_->counts[r] : real_->rows(rank); // which refuses the rank
    }
    std::span<cpx::section const> sections() const { return real_->sections(); }
    cpx::range heads(int rank, cpx::index_t count) const { return real_->heads(rank, count); }
    template <class F>
    void for_each_piece(int rank, F&& f) const {
        for (cpx::range const piece : real_->pieces[static_cast<std::size_t>(rank)]) f(piece);
    }
    template <class F>
    void for_each_holder(cpx::range rows, cpx::index_t& run, F&& f) const {
        real_->holders(rows, run, f);
    }

private:
    struct base {
        virtual ~base() = default;
        virtual int ranks() const = 0;
        virtual cpx::thd const& batch() const = 0;
        virtual cpx::index_t rows(int rank) const = 0;
        virtual std::span<cpx::section const> sections() const = 0;
        virtual cpx::range heads(int rank, cpx::index_t count) const = 0;
        virtual void holders(cpx::range rows, cpx::index_t& run,
                             cpx::detail::function_ref<void(int, cpx::range)> f) const = 0;
        std::vector<std::vector<cpx::range>> pieces; ///< of each rank
        std::vector<cpx::index_t> counts;            ///< of its rows
    };
    template <class S>
    struct model final : base {
        explicit model(S s) : sharding(std::move(s)) {
            for (int rank = 0; rank < sharding.ranks(); ++rank) {
                sharding.for_each_piece(rank,
                                        [&list = this->pieces.emplace_back()](cpx::range p) { list.push_back(p); });
                this->counts.push_back(sharding.rows(rank));
            }
        }
        int ranks() const override { return sharding.ranks(); }
        cpx::thd const& batch() const override { return sharding.batch(); }
        cpx::index_t rows(int rank) const override { return sharding.rows(rank); }
        std::span<cpx::section const> sections() const override { return sharding.sections(); }
        cpx::range heads(int rank, cpx::index_t count) const override { return sharding.heads(rank, count); }
        void holders(cpx::range rows, cpx::index_t& run,
                     cpx::detail::function_ref<void(int, cpx::range)> f) const override {
            sharding.for_each_holder(rows, run, f);
        }
        S sharding;
    };
    std::shared_ptr<base const> real_;
};

using any_tokens = erased<false>;
using any_rows = erased<true>;

} // namespace support
