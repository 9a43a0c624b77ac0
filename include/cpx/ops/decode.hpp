// SPDX-License-Identifier: Apache-2.0
// Decoding with gated delta net layers: their states, and how these go from one sharding to another.
#pragma once

#include <cpx/core/element.hpp>
#include <cpx/layout/table.hpp>
#include <cpx/ops/gated_delta_net.hpp>

namespace cpx {

/// Returns where every sequence ends, as the sharding of a batch of one row a sequence: the row lies on the rank that
/// holds the last token, on rank 0 if there is none. There an operator leaves the states of a sequence.
template <any_sharding S>
    requires(!S::every_row)
sharding<table, scope::batch> sequence_ends(S const& s) {
    thd const& batch = s.batch();
    std::vector<int> owners(static_cast<std::size_t>(std::max<index_t>(1, batch.sequences()))); // no table is empty
    index_t hint = 0;
    for (index_t i = 0; i < batch.sequences(); ++i) {
        index_t const end = batch.offset(i + 1);
        if (batch.length(i) > 0)
            s.for_each_holder(range{end - 1, end}, hint,
                              [&](int rank, range) { owners[static_cast<std::size_t>(i)] = rank; });
    }
    return shard<scope::batch>(thd::uniform(batch.sequences(), 1), table(s.ranks(), std::move(owners)));
}
template <class X>
detail::refused sequence_ends(X const&) {
    static_assert(detail::never<X>, "cpx: sequence_ends wants a sharding by tokens, such as shard(batch, zigzag<4>{}) "
                                    "returns");
    return {};
}
template <class X>
detail::refused sequence_ends(X const&, detail::any, detail::any = {}) {
    return sequence_ends(detail::any());
}

/// Owns the states of one gated delta net layer on one rank, zeros at first: those of sequences that have not begun.
template <class T, any_memory M = host_memory>
class gated_delta_net_cache {
public:
    static_assert(!std::same_as<T, detail::untold>, "cpx: a gated_delta_net_cache cannot tell its elements; write "
                                                    "gated_delta_net_cache<float>(config, plan)");

    /// `plan`: by what the recurrence carries its states; of its batch only the number of sequences counts. `memory`:
    /// that of the layer's tensors.
    template <carry_kind How, any_sharding S>
    gated_delta_net_cache(gated_delta_net_config const& config, carry_plan<How, S> const& plan, M const& memory,
                          caller here = caller::here())
        : gated_delta_net_cache(detail::gated_delta_widths<S>(detail::checked(config, here), plan.sharding, plan.rank),
                                plan.sharding.batch().sequences(), memory, here) {}
    template <carry_kind How, any_sharding S>
        requires std::same_as<M, host_memory>
    gated_delta_net_cache(gated_delta_net_config const& config, carry_plan<How, S> const& plan,
                          caller here = caller::here())
        : gated_delta_net_cache(config, plan, M(), here) {}
    template <class X = void>
    explicit gated_delta_net_cache(detail::any = {}, detail::any = {}, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: gated_delta_net_cache<T>(config, plan) wants a gated_delta_net_config "
                                        "and the recurrence's carry_plan, such as carry<scan>(sharding, rank) returns");
    }
    gated_delta_net_state<T, M> view() { return {conv_.view(), recurrent_.view()}; }

private:
    template <any_sharding S>
    gated_delta_net_cache(detail::gated_delta_widths<S> const& n, index_t sequences, M const& memory, caller here)
        : conv_(memory, sequences, n.conv, here), recurrent_(memory, sequences, n.recurrent, here) {}

    row_buffer<T, M> conv_;
    row_buffer<typename M::template sum<T>, M> recurrent_;
};
template <class X = void>
gated_delta_net_cache(detail::any = {}, detail::any = {}, detail::any = {}) -> gated_delta_net_cache<detail::untold>;

namespace detail {

/// Returns the sharding of states, one row a sequence, in which a recurrence on `s` leaves and takes them.
template <any_sharding S>
    requires(!S::every_row)
auto state_sharding(S const& s, std::vector<section> const&) {
    return sequence_ends(s);
}
template <int W>
head_sharded<W> state_sharding(head_sharded<W> const& s, std::vector<section> const& sections) {
    thd const batch = thd::uniform(s.batch().sequences(), 1);
    if constexpr (W == dynamic)
        return {s.ranks(), batch, sections};
    else
        return {batch, sections};
}
template <int W>
replicated<W> state_sharding(replicated<W> const& s, std::vector<section> const&) {
    thd const batch = thd::uniform(s.batch().sequences(), 1);
    if constexpr (W == dynamic)
        return replicated<W>(s.ranks(), batch);
    else
        return replicated<W>(batch);
}
template <any_sharding S>
using state_sharding_of = decltype(state_sharding(std::declval<S const&>(), {}));

} // namespace detail

/// Moves the states of gated delta net layers from where a batch left them to where the next one reads them, in the
/// host's memory. States on devices stay there: decode by heads what was begun by heads, or on `sequence_ends`.
///
/// `from`: the carry plan by which the recurrence ran. `to`: that by which it runs next, over any batch of the same
/// sequences: by heads, replicated, or by tokens if no sequence has more than one token. To go on by tokens with many
/// tokens a sequence, hand over to `replicated`, because several ranks may then read one state.
///
///     prefill                             gated_delta_net on any sharding, writes the states
///     gated_delta_net_relayout            once a batch for all layers, one exchange a layer
///     decode, a token a sequence a step   gated_delta_net over thd::uniform(sequences, 1), reads and writes the states
///
/// Where to decode: a sequence on one rank, the recurrence in place (`shard<scope::batch>(thd::uniform(n, 1),
/// table(ranks, rank of each sequence))`, or `sequence_ends(prefill)`, for which no state moves); or the recurrence by
/// heads on all ranks. A finished sequence may have no token in later steps: its state stays where it is, and is handed
/// on from the last sharding in which the sequence had a token.
///
/// Attention layers keep keys and values, not states, see `attention_cache`. Positions for the rotary embedding go on
/// from the length that the sequence had.
template <any_sharding From, any_sharding To>
class gated_delta_net_relayout {
public:
    /// Pure: no communication.
    ///
    /// Throws `cpx::error` if sequences, ranks or heads do not fit, or if `to` is by tokens and gives a sequence more
    /// than one.
    template <carry_kind A, carry_kind B>
    gated_delta_net_relayout(carry_plan<A, From> const& from, carry_plan<B, To> const& to,
                             gated_delta_net_config const& config, caller here = caller::here())
        : plan_(make(from.sharding, to.sharding, from.rank, config, here)),
          source_(plan_.from, from.sharding, from.rank, config), target_(plan_.to, to.sharding, to.rank, config) {
        constexpr int a = static_ranks<From>, b = static_ranks<To>;
        static_assert(
            a == dynamic || b == dynamic || a == b,
            "cpx: gated_delta_net_relayout between shardings over different numbers of ranks; shard both over "
            "the same ranks");
        require(to.rank == from.rank, where, "rank of the target", from.rank, to.rank, here);
    }
    template <class X = detail::any>
    explicit gated_delta_net_relayout(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
        : gated_delta_net_relayout(unfit<X>()) {}

    /// Returns the plan, whose rows are the states of a sequence, conv and then recurrent.
    plan const& moves() const { return plan_; }

    /// Hands the states of one layer over: `from` and `to` are as `gated_delta_net_state` says, for the heads of either
    /// sharding. Collective: one exchange.
    ///
    /// Reads the rows of sequences that end on this rank, or all where every rank has all, and writes those of
    /// sequences that go on here; leaves the others alone. `from` and `to` may be the same.
    /// Throws `cpx::error` on shapes that do not fit, and what `exchange` throws.
    template <class T, elements_of<T> A, transport Comm>
    void operator()(gated_delta_net_state<A> const& from, gated_delta_net_state<T> const& to, Comm& comm,
                    caller here = caller::here()) const {
        source_.check("states of the source", from, here);
        target_.check("states of the target", to, here);
        detail::require_apart(where, {{"conv", to.conv}, {"recurrent", to.recurrent}}, {}, here);
        std::vector<T> leaving;
        auto coming = detail::zeros<T>(where, {std::ssize(target_.sequences), target_.width()}, here);
        leaving.reserve(source_.size());
        for (index_t const s : source_.sequences) {
            leaving.insert(leaving.end(), from.conv.row(s), from.conv.row(s) + source_.conv);
            leaving.insert(leaving.end(), from.recurrent.row(s), from.recurrent.row(s) + source_.recurrent);
        }
        detail::exchange_rows(plan_, rows<T const>(leaving.data(), std::ssize(source_.sequences), source_.width()),
                              rows<T>(coming.data(), std::ssize(target_.sequences), target_.width()), comm, here,
                              where);
        T const* next = coming.data();
        for (index_t const s : target_.sequences) {
            std::copy_n(next, target_.conv, to.conv.row(s));
            std::copy_n(next + target_.conv, target_.recurrent, to.recurrent.row(s));
            next += target_.width();
        }
    }
    template <class X = void>
    detail::refused operator()(detail::any = {}, detail::any = {}, detail::any = {}, detail::any = {}) const {
        static_assert(detail::never<X>, "cpx: a gated_delta_net_relayout takes the gated_delta_net_states of a layer, "
                                        "from and to, whose elements are the same, and a cpx::transport");
        return {};
    }

private:
    static constexpr char const* where = "gated_delta_net_relayout";
    using relayout_type = relayout_plan<detail::state_sharding_of<From>, detail::state_sharding_of<To>>;

    template <class X>
    static gated_delta_net_relayout const& unfit() {
        static_assert(detail::never<X>,
                      "cpx: gated_delta_net_relayout(from, to, config) wants two carry_plans, such as "
                      "carry<scan>(sharding, rank) returns, and a gated_delta_net_config");
        throw;
    }

    static relayout_type make(From const& from, To const& to, int rank, gated_delta_net_config const& config,
                              caller here) {
        require(to.batch().sequences() == from.batch().sequences(), where, "sequences of the target",
                from.batch().sequences(), to.batch().sequences(), here);
        auto const of_layer = detail::checked(config, here).sections();
        for (auto const given : {from.sections(), to.sections()})
            require(given.empty() || std::ranges::equal(given, of_layer), where, "sections of a sharding by heads",
                    "those of the layer", "others", here);
        for (index_t s = 0; !To::every_row && s < to.batch().sequences(); ++s)
            if (to.batch().length(s) > 1)
                throw error(where, "tokens of sequence " + std::to_string(s) + " in the target",
                            "at most 1, or a sharding of whole sequences, such as replicated",
                            std::to_string(to.batch().length(s)), here);
        std::vector<section> sections;
        for (index_t tap = 0; tap < config.kernel; ++tap)
            sections.insert(sections.end(), of_layer.begin(), of_layer.begin() + 3);
        sections.push_back({config.heads.value_heads, config.heads.key_dim * config.heads.value_dim});
        return relayout(detail::state_sharding(from, sections), detail::state_sharding(to, sections), rank, here);
    }

    /// The states that a rank has: of which sequences, and how wide.
    struct held_states {
        index_t all, conv, recurrent;
        std::vector<index_t> sequences = {};

        template <class Held, class S>
        held_states(Held const& held, S const& sharding, int rank, gated_delta_net_config const& config)
            : all(held.batch().sequences()) {
            detail::gated_delta_widths<S> const n(config, sharding, rank);
            conv = n.conv;
            recurrent = n.recurrent;
            held.for_each_piece(rank, [&](range piece) {
                for (index_t s = piece.first; s < piece.last; ++s) sequences.push_back(s);
            });
        }
        index_t width() const { return conv + recurrent; }
        std::size_t size() const { return sequences.size() * static_cast<std::size_t>(width()); }

        template <class A>
        void check(char const* which, gated_delta_net_state<A> const& state, caller here) const {
            detail::require_shape(where, (which + std::string(", conv")).c_str(), state.conv, all, conv, here);
            detail::require_shape(where, (which + std::string(", recurrent")).c_str(), state.recurrent, all, recurrent,
                                  here);
        }
    };

    relayout_type plan_;
    held_states source_, target_;
};
template <class X = detail::any>
gated_delta_net_relayout(X const& = {}, detail::any = {}, detail::any = {}, detail::any = {})
    -> gated_delta_net_relayout<replicated<1>, replicated<1>>;

} // namespace cpx
