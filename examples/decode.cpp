// SPDX-License-Identifier: Apache-2.0
// Decodes with a checkpoint of Qwen3.5 under context parallelism: the log-probabilities of a prefill and of tokens that
// come one by one after it must be those that transformers computes of whole sequences, whatever the strategy.

#include "common/command_line.hpp"
#include "common/figures.hpp"
#include "common/tokens.hpp"
#include "qwen/host.hpp"

#include <cpx/ops/attention_cache.hpp>
#include <cpx/ops/decode.hpp>

#include <cmath>
#include <cstdio>

namespace {

using cpx::index_t;
using rank_type = qwen::host_rank<double>;
using lists = std::vector<index_t>;

/// One way to run the model: where a prefill's tokens are, and what runs by heads, then and later.
struct strategy {
    examples::sharding_spec layout;
    bool serial, recurrence_by_heads, attention_by_heads;
};

/// Sequences of a reference file, of which tokens `[done_s, next_s)` come now.
struct generation {
    cpx::thd whole;
    std::vector<index_t> ids;
    lists done, next;

    cpx::thd batch() const {
        lists offsets{0};
        for (std::size_t s = 0; s < done.size(); ++s) offsets.push_back(offsets.back() + next[s] - done[s]);
        return cpx::thd(offsets);
    }
};

/// What a rank keeps of every layer, from the first batch on.
struct kept {
    std::map<index_t, cpx::attention_cache<double>> keys;
    std::map<index_t, cpx::gated_delta_net_cache<double>> states;
};

cpx::attention_heads heads_of(cpx::hf_config const& c) {
    return {*c.num_attention_heads, *c.num_key_value_heads, *c.head_dim};
}

/// One rank's pass of a batch on A, whose recurrences run on Mix: A too, or by heads.
template <class How, class A, class Mix>
class pass {
    using var = typename qwen::tape<rank_type>::template var<A>;
    using carry = std::conditional_t<Mix::every_row, cpx::serial, How>;

public:
    pass(rank_type& rank, kept& of, A const& where, Mix const& mix, bool attention_by_heads)
        : at_(rank, {}, cpx::sum_order::by_row), kept_(of), where_(where), mix_(mix), heads_(heads_of(config())),
          by_heads_(attention_by_heads), split_(where.ranks(), where.batch(), {queries(), keys(), keys()}),
          out_(where.ranks(), where.batch(), {queries()}) {}

    /// Writes log p(the next token) of every token of this rank to its place among those of whole sequences.
    void run(generation const& g, std::vector<double>& to) {
        int const rank = at_.rank.rank();
        lists rows, ids; // of whole sequences
        for (cpx::segment const& s : segments(where_, rank))
            for (index_t i = 0; i < s.count; ++i) {
                index_t const token = g.done[static_cast<std::size_t>(s.sequence)] + s.token + i;
                tokens_.push_back(token);
                rows.push_back(g.whole.offset(s.sequence) + token);
                ids.push_back(g.ids[static_cast<std::size_t>(rows.back())]);
            }
        auto const& c = config();
        auto h = at_.make(where_, *c.hidden_size);
        gather_rows<double>(at_.rank.memory(), at_.rank.weight("model.embed_tokens.weight"), ids, h->data());
        auto const net = qwen::delta_net_of(carry(), where_, mix_, rank, qwen::delta_net_config(c, at_.rank.chunk));
        auto const types = c.layers();
        for (index_t i = 0; i < std::ssize(types); ++i) {
            auto const x = at_.norm(qwen::layer_name(i, "input_layernorm.weight"), h);
            bool const linear = types[static_cast<std::size_t>(i)] == cpx::layer_type::linear_attention;
            h = qwen::mlp(at_, i, at_.sum(h, linear ? linear_attention(net, i, x) : attention(i, x)));
        }
        auto const logits = at_.linear("lm_head.weight", at_.norm("model.norm.weight", h));
        lists labels;
        for (index_t const row : rows) {
            index_t const next = row + 1 == g.whole.tokens() || g.whole.sequence(row + 1) != g.whole.sequence(row)
                                     ? cpx::ignored
                                     : g.ids[static_cast<std::size_t>(row + 1)];
            labels.push_back(next);
        }
        auto const logp = at_.beside(h, 1);
        at_.each(logp->data(), cpx::rowwise::log_probability<double>{logits->data(), labels.data(), logp->data()});
        for (std::size_t i = 0; i < rows.size(); ++i)
            to[static_cast<std::size_t>(rows[i])] = logp->data()(static_cast<index_t>(i), 0);
    }

private:
    cpx::hf_config const& config() const { return at_.rank.model.config; }
    cpx::section queries() const { return {heads_.query_heads, heads_.dim}; }
    cpx::section keys() const { return {heads_.key_heads, heads_.dim}; }

    var linear_attention(auto const& net, index_t layer, var const& x) {
        cpx::gated_delta_net_weights<double> w;
        for_each_parameter(w, net.config(), [&](char const* name, auto& rows, index_t, index_t) {
            rows = at_.rank.weight(qwen::layer_name(layer, "linear_attn.") + name);
        });
        auto const y = at_.beside(x, x->width());
        auto& states = kept_.states.try_emplace(layer, net.config(), net.states()).first->second;
        auto to = y->view();
        net(w, x->view(), to, at_.rank.comm, {.state = states.view()});
        return y;
    }

    var attention(index_t layer, var const& x) {
        return qwen::attention_layer(at_, layer, x, [&](var const& q, var const& k, var const& v) {
            for (auto const& of : {q, k})
                cpx::rotary<double>(of->data(), heads_.dim, tokens_, {*config().rope_theta, config().rotary_dim()},
                                    of->data());
            auto const o = by_heads_ ? attend_by_heads(layer, at_.join({q, k, v})) : at_.beside(q, q->width());
            if (!by_heads_) attend(layer, where_, q->view(), k->view(), v->view(), o->view());
            return o;
        });
    }
    var attend_by_heads(index_t layer, var const& qkv) {
        int const rank = at_.rank.rank();
        auto const all = exchange(relayout(where_, split_, rank), qkv->value, at_.rank.comm);
        index_t const q = split_.heads(rank, heads_.query_heads).size() * heads_.dim, k = (all.width() - q) / 2;
        auto o = cpx::make_tensor<double>(out_, rank, q);
        auto const of = [&](index_t first, index_t columns) { return all.view().columns(first, columns); };
        cpx::sharded const to(o.data(), split_, rank);
        attend(layer, split_, of(0, q), of(q, k), of(q + k, k), to);
        auto const y = at_.beside(qkv, heads_.query_heads * heads_.dim);
        exchange(relayout(out_, where_, rank), o.view(), y->view(), at_.rank.comm);
        return y;
    }
    /// Attention over what has come, of queries, keys and values on `on`, which are kept there.
    template <class On, class Q, class K, class O>
    void attend(index_t layer, On const& on, Q const& q, K const& k, K const& v, O to) {
        auto& cache = kept_.keys.try_emplace(layer, heads_, on, at_.rank.comm).first->second;
        cache.append(k, v);
        cpx::cached_attention(on, at_.rank.comm)(cache, q, 1 / std::sqrt(static_cast<double>(heads_.dim)), to,
                                                 at_.rank.comm);
    }

    qwen::tape<rank_type> at_; ///< whose way back nobody goes
    kept& kept_;
    A const& where_;
    Mix const& mix_;
    cpx::attention_heads heads_;
    bool by_heads_;
    cpx::head_sharded<> split_, out_;
    lists tokens_; ///< where this rank's rows stand in their sequences
};

/// Runs a batch on `where`, as the strategy wants.
template <class A>
void run(rank_type& rank, kept& of, A const& where, strategy const& how, generation const& g, std::vector<double>& to) {
    auto const on = [&]<class How, class Mix>(How, Mix const& mix) {
        pass<How, A, Mix>(rank, of, where, mix, how.attention_by_heads).run(g, to);
    };
    auto const sections = qwen::delta_net_config(rank.model.config, rank.chunk).sections();
    if (how.recurrence_by_heads)
        on(cpx::serial(), cpx::head_sharded<>(where.ranks(), where.batch(), sections));
    else if (how.serial)
        on(cpx::serial(), where);
    else
        on(cpx::scan(), where);
}

/// At most one token a sequence, sequence s on rank (s + 1) % ranks.
auto on_owners(cpx::thd const& batch, int ranks) {
    std::vector<int> owners; // of tokens
    for (index_t s = 0; s < batch.sequences(); ++s)
        if (batch.length(s) > 0) owners.push_back(static_cast<int>((s + 1) % ranks));
    using sharding = examples::token_sharding<cpx::scope::batch>;
    return sharding(batch, cpx::table(ranks, owners), cpx::aligned<cpx::dynamic>(1));
}

/// Returns the log-probabilities of whole sequences, of which the last `tokens` come one by one.
std::vector<double> decode(cpx::qwen_checkpoint<double> const& model, cpx::thd const& whole, lists const& ids,
                           int ranks, index_t tokens, strategy const& how) {
    std::vector<double> to(ids.size());
    cpx::threads::run(ranks, [&](cpx::threads& thread) {
        cpx::transport_ref comm(thread);
        rank_type rank(model, comm, 64, 1);
        kept of;
        generation g{whole, ids, lists(static_cast<std::size_t>(whole.sequences())), {}};
        for (index_t s = 0; s < whole.sequences(); ++s)
            g.next.push_back(std::max(whole.length(s) - tokens, index_t{0}));
        examples::with_token_sharding(g.batch(), how.layout, {}, ranks, [&](auto const& where) {
            run(rank, of, where, how, g, to);
            if (how.recurrence_by_heads) return; // states stay where they are
            auto const next = on_owners(cpx::thd::uniform(whole.sequences(), 1), ranks);
            cpx::gated_delta_net_relayout const hand_over(cpx::carry<cpx::scan>(where, rank.rank()),
                                                          cpx::carry<cpx::scan>(next, rank.rank()),
                                                          qwen::delta_net_config(model.config, rank.chunk));
            for (auto& [layer, states] : of.states) hand_over(states.view(), states.view(), rank.comm);
        });
        for (index_t left = tokens; left > 0; --left) { // all sequences end with the last step
            g.done = g.next;
            for (std::size_t s = 0; s < g.next.size(); ++s)
                g.next[s] += whole.length(static_cast<index_t>(s)) - g.done[s] >= left;
            auto const batch = g.batch();
            if (batch.tokens() > 0) run(rank, of, on_owners(batch, ranks), how, g, to);
        }
    });
    return to;
}

/// A line of the table: a strategy by the names of its parts, and the largest difference from the reference.
struct result {
    char const *prefill, *recurrence, *attention;
    double delta;
};

} // namespace

int main(int argc, char** argv) {
    examples::command_line app(
        "Decodes with a checkpoint of Qwen3.5 under context parallelism, in float64, and compares "
        "with a reference.",
        "decode");
    std::string directory, reference, ranks = "3", count = "32";
    app.required("--model", directory, "directory with config.json and model.safetensors");
    app.required("--reference", reference, "safetensors file with input_ids, cu_seqlens and logprobs, of text alone");
    app.option("--ranks", ranks, "ranks, as threads, at most 256");
    app.option("--tokens", count, "how many tokens of each sequence come one by one, after the others at once");
    return app.run(argc, argv, [&] {
        int const of = examples::parse_ranks(ranks, examples::most_threads);
        index_t const tokens = examples::parse_number(count, 0, 1 << 20, "--tokens", "tokens");
        cpx::qwen_checkpoint<double> const model(directory);
        cpx::require(!model.config.multimodal(), "--model", "model", "one of text", "one of images and videos");
        cpx::safetensors const file(reference);
        auto const [whole, ids] = examples::read_tokens(file, model.config);
        auto const expected = file.read<double>("logprobs", {whole.tokens()});
        std::vector<result> results;
        double largest = 0;
        for (char const* const layout : {"sequential", "sequential:batch", "zigzag", "striped"})
            for (char const* const recurrence : {"scan", "serial", "by heads"})
                for (bool const heads : {false, true}) {
                    std::string_view const name = recurrence;
                    strategy const how{examples::parse_sharding(layout), name == "serial", name == "by heads", heads};
                    auto const found = decode(model, whole, ids, of, tokens, how);
                    double delta = 0;
                    for (std::size_t i = 0; i < found.size(); ++i)
                        delta = std::max(delta, examples::number(std::abs(found[i] - expected[i]), file.where(),
                                                                 "log-probability " + std::to_string(i)));
                    largest = std::max(largest, delta);
                    results.push_back({layout, recurrence, heads ? "by heads" : "by tokens", delta});
                }
        std::printf("%d ranks; of %lld tokens the last %lld of each sequence one by one\n\n%-18s %-12s %-10s %s\n", of,
                    static_cast<long long>(whole.tokens()), static_cast<long long>(tokens), "prefill", "recurrence",
                    "attention", "|delta log-probability|");
        for (result const& r : results)
            std::printf("%-18s %-12s %-10s %.1e\n", r.prefill, r.recurrence, r.attention, r.delta);
        bool const equal = largest <= 1e-9;
        std::printf("\n%s\n", equal ? "all as whole sequences" : "not as whole sequences");
        cpx::require(equal, file.where().c_str(), "log-probabilities", "those of whole sequences, within 1e-9",
                     "some that differ by " + std::to_string(largest));
    });
}
