// SPDX-License-Identifier: Apache-2.0
// Any sharding behind two types: what operators are compiled for.
#pragma once

#include <cpx/layout/head_sharded.hpp>
#include <cpx/layout/table.hpp>
#include <cpx/plan/carry.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

namespace binding {

using cpx::index_t;
using cpx::range;

/// Chunks into which a run of tokens is cut, and the rank that owns each; of two layouts among which runs choose, those
/// of both. What is prepared for later batches has room for so many.
struct chunk_list {
    std::vector<int> owners;
    int first = 0;         ///< chunks of the first of two layouts, or of all
    index_t multiple = 1;  ///< of a length that the first of two layouts cuts
    bool of_batch = false; ///< whether the whole batch is cut, not each sequence
    int unit = 1;          ///< to whose multiples chunks are cut

    int chunks() const { return static_cast<int>(owners.size()); }
    int owner(int chunk) const { return owners[static_cast<std::size_t>(chunk)]; }
    friend bool operator==(chunk_list const&, chunk_list const&) = default;
};

/// A sharding that asks a real one behind it. `EveryRow`: whether every rank holds every row.
template <bool EveryRow>
class any_of {
public:
    static constexpr bool every_row = EveryRow;

    template <class S>
        requires(!std::same_as<S, any_of>) && cpx::any_sharding<S> && (S::every_row == EveryRow)
    explicit any_of(S sharding, std::string text)
        : real_(std::make_shared<model<S>>(std::move(sharding), std::move(text))) {}

    friend bool operator==(any_of const& a, any_of const& b) { return a.real_ == b.real_ || a.real_->equals(*b.real_); }

    int ranks() const { return real_->ranks(); }
    cpx::thd const& batch() const { return real_->batch(); }
    index_t rows(int rank) const {
        auto const place = static_cast<std::size_t>(rank);
        if (place >= real_->rows_known.size()) return real_->rows(rank); // which throws
        auto& known = real_->rows_known[place];
        index_t count = known.load(std::memory_order_relaxed);
        if (count == 0) known.store(count = real_->rows(rank) + 1, std::memory_order_relaxed);
        return count - 1;
    }
    std::span<cpx::section const> sections() const { return real_->sections(); }
    range heads(int rank, index_t count) const { return real_->heads(rank, count); }
    template <class F>
    void for_each_piece(int rank, F&& f) const {
        real_->pieces(rank, std::ref(f));
    }
    template <class F>
    void for_each_holder(range rows, index_t& run, F&& f) const {
        real_->holders(rows, run, std::ref(f));
    }

    /// Returns the chunks of a run; none where every batch may have others.
    chunk_list const& policy() const
        requires(!EveryRow)
    {
        return real_->chunks;
    }
    /// See `cpx::detail::with_lanes`: of one layout that cuts each sequence.
    template <class F>
    void with_lanes(F&& f) const
        requires(!EveryRow)
    {
        chunk_list const& of = real_->chunks;
        if (!of.of_batch && of.chunks() > 0 && of.first == of.chunks()) f(cpx::table(ranks(), of.owners), of.unit);
    }
    /// See `cpx::detail::cut_alike`: of such layouts.
    bool cut_alike(any_of const& other) const
        requires(!EveryRow)
    {
        return ranks() == other.ranks() && real_->chunks == other.real_->chunks;
    }
    /// Returns how a user would write it: "zigzag(4) over sequence".
    std::string const& text() const { return real_->text; }
    /// See `cpx::is_exact`.
    bool is_exact(bool serial, index_t chunk) const { return real_->exact(serial, chunk); }
    /// Returns the sharding behind it if it is an `S`, else null.
    template <class S>
    S const* get() const {
        return real_->type == typeid(S) ? &static_cast<model<S> const&>(*real_).sharding : nullptr;
    }
    /// Returns what identities of plans say of the sharding behind it, under its text as its name.
    cpx::detail::identity_end const& end() const { return real_->end; }

private:
    struct base {
        base(std::type_info const& of, std::string what, chunk_list of_run, int ranks,
             cpx::detail::identity_end const& real)
            : type(of), text(std::move(what)), end{text, real.hash, real.text, real.all}, chunks(std::move(of_run)),
              rows_known(static_cast<std::size_t>(ranks)) {}
        base(base const&) = delete; // `end` refers to `text`
        virtual ~base() = default;
        virtual bool equals(base const& other) const = 0;
        virtual int ranks() const = 0;
        virtual cpx::thd const& batch() const = 0;
        virtual index_t rows(int rank) const = 0;
        virtual std::span<cpx::section const> sections() const = 0;
        virtual range heads(int rank, index_t count) const = 0;
        virtual void pieces(int rank, std::function<void(range)> const& f) const = 0;
        virtual void holders(range rows, index_t& run, std::function<void(int, range)> const& f) const = 0;
        virtual bool exact(bool serial, index_t chunk) const = 0;
        std::type_info const& type; ///< of the sharding
        std::string const text;
        cpx::detail::identity_end const end;
        chunk_list const chunks;
        mutable std::vector<std::atomic<index_t>> rows_known; ///< of each rank and one more, 0: not counted yet
    };
    template <class S>
    static chunk_list chunks_of(S const& sharding) {
        chunk_list all;
        auto const add = [&](auto const& layout) {
            if constexpr (cpx::layout<std::remove_cvref_t<decltype(layout)>>)
                for (int c = 0; c < layout.chunks(); ++c) all.owners.push_back(layout.owner(c));
        };
        if constexpr (requires { sharding.policy().first; }) {
            add(sharding.policy().first);
            all.first = all.chunks();
            all.multiple = sharding.policy().rule.multiple;
            add(sharding.policy().second);
        } else if constexpr (requires { sharding.policy(); }) {
            add(sharding.policy());
            all.first = all.chunks();
        }
        if constexpr (requires { sharding.cut().unit(); }) {
            all.of_batch = S::cuts == cpx::scope::batch;
            all.unit = sharding.cut().unit();
        }
        return all;
    }
    template <class S>
    struct model final : base {
        model(S s, std::string what)
            : base(typeid(S), std::move(what), chunks_of(s), s.ranks(), cpx::detail::end_of(s)),
              sharding(std::move(s)) {}
        bool equals(base const& other) const override {
            return other.type == this->type && static_cast<model const&>(other).sharding == sharding;
        }
        int ranks() const override { return sharding.ranks(); }
        cpx::thd const& batch() const override { return sharding.batch(); }
        index_t rows(int rank) const override { return sharding.rows(rank); }
        std::span<cpx::section const> sections() const override { return sharding.sections(); }
        range heads(int rank, index_t count) const override { return sharding.heads(rank, count); }
        void pieces(int rank, std::function<void(range)> const& f) const override { sharding.for_each_piece(rank, f); }
        void holders(range rows, index_t& run, std::function<void(int, range)> const& f) const override {
            sharding.for_each_holder(rows, run, f);
        }
        bool exact(bool serial, index_t chunk) const override {
            return serial ? cpx::is_exact<cpx::serial>(sharding, chunk) : cpx::is_exact<cpx::scan>(sharding, chunk);
        }
        S sharding;
    };
    std::shared_ptr<base const> real_;
};

using any_tokens = any_of<false>; ///< every row on one rank
using any_rows = any_of<true>;    ///< every row on every rank

} // namespace binding

// Plans are named after the sharding behind one of these, which all ranks read in errors.
template <>
inline cpx::detail::identity_end cpx::detail::end_of(binding::any_tokens const& s) {
    return s.end();
}
template <>
inline cpx::detail::identity_end cpx::detail::end_of(binding::any_rows const& s) {
    return s.end();
}

namespace binding {

struct recipe; ///< by which Python makes a thing again

/// A sharding of Python.
struct any_layout {
    std::variant<any_tokens, any_rows> real;
    std::shared_ptr<recipe const> made{}; ///< null of features', which positions and media make

    template <class F>
    decltype(auto) visit(F&& f) const {
        return std::visit(std::forward<F>(f), real);
    }
    int ranks() const {
        return visit([](auto const& s) { return s.ranks(); });
    }
    cpx::thd const& batch() const {
        return visit([](auto const& s) -> cpx::thd const& { return s.batch(); });
    }
    bool every_row() const { return real.index() == 1; }
    std::string const& text() const {
        return visit([](auto const& s) -> std::string const& { return s.text(); });
    }
    friend bool operator==(any_layout const& a, any_layout const& b) { return a.real == b.real; }
};

} // namespace binding
