// SPDX-License-Identifier: Apache-2.0
// Runs the operator of a golden file on a sharding: one function a kind.
#pragma once

#include "../common/sharding_options.hpp"

#include <cpx/model/json.hpp>
#include <cpx/model/safetensors.hpp>
#include <cpx/ops.hpp>

#include <initializer_list>
#include <map>
#include <mutex>
#include <string>

namespace verify {

/// What a golden file should give, by the names of its tensors.
template <class T>
using outputs = std::map<std::string, std::vector<T>>;

/// A golden file, its packed batch and the way to run it.
struct job {
    cpx::safetensors file;
    cpx::thd batch;
    examples::sharding_spec layout;
    examples::cut_spec cut;
    int ranks = 1;
    cpx::index_t chunk = 64;
    bool serial = false; ///< how states are handed on, by tokens

    cpx::index_t tokens() const { return batch.tokens(); }
    bool by_heads() const { return layout.name == "head_sharded"; }
};

/// Throws `cpx::error` unless the sizes that the file gives an operator are from 1 to 2^16: then products of some of
/// them with the numbers of tokens or sequences do not wrap, whatever shapes tensors without elements have.
inline void check_sizes(job const& j, std::initializer_list<std::pair<char const*, cpx::index_t>> sizes) {
    for (auto const& [name, size] : sizes)
        cpx::require(1 <= size && size <= 1 << 16, j.file.where().c_str(), name, "1 to 65536", size);
}

/// Throws `cpx::error` that names a tensor of another shape than expected, but for axes of size 1.
inline void check_shape(job const& j, std::string const& name, std::vector<cpx::index_t> const& expected) {
    auto const sizes = [](std::vector<cpx::index_t> shape) {
        std::erase(shape, 1);
        return shape;
    };
    if (sizes(j.file.tensor(name).shape) != sizes(expected))
        static_cast<void>(j.file.read<double>(name, expected)); // which throws
}

/// The same of an output, which is shaped as the input that it is the gradient of, or goes with.
inline void check_output_shape(job const& j, std::string const& name) {
    static std::map<std::string, std::string> const inputs{
        {"y", "x"},     {"o", "v"},    {"output", "hidden_states"}, {"d_hidden_states", "hidden_states"},
        {"q_rot", "q"}, {"k_rot", "k"}};
    if (name == "position_ids") return check_shape(j, name, {3, j.tokens()});
    if (name == "final_state") return; // read before, by its shape
    auto const found = inputs.find(name);
    std::string const of = found != inputs.end()       ? found->second
                           : name.starts_with("grad.") ? "weight." + name.substr(5)
                                                       : name.substr(1);
    check_shape(j, name, j.file.tensor(of).shape);
}

/// Returns what a text of the metadata stands for. Throws `cpx::error` that lists the `known` ones.
template <class Value>
Value choose(job const& j, char const* key, std::initializer_list<std::pair<char const*, Value>> known) {
    std::string const& text = j.file.metadata(key);
    std::string names;
    for (auto const& [name, value] : known) {
        if (text == name) return value;
        names += (names.empty() ? "" : " or ") + std::string(name);
    }
    throw cpx::error(j.file.where(), std::string(key) + " in the metadata", names, cpx::quote(text));
}

/// Returns this rank's share of a whole tensor, as a data loader takes it: nothing moves.
template <class T, class S>
cpx::tensor<T, S> take(std::vector<T> const& whole, cpx::index_t width, S const& sharding, cpx::threads& comm) {
    cpx::replicated<> const everywhere(sharding.ranks(), sharding.batch());
    auto const plan = relayout(everywhere, sharding, comm.rank());
    cpx::tensor<T, S> local(sharding, comm.rank(), plan.target_width ? plan.target_width : width);
    exchange(plan, cpx::sharded(cpx::rows<T const>(whole, width), everywhere, comm.rank()), local.view(), comm);
    return local;
}

/// Returns the whole of a tensor of which every rank has a share.
template <class T, class S>
std::vector<T> gather(cpx::rows<T const> local, cpx::index_t width, S const& sharding, cpx::threads& comm) {
    cpx::replicated<> const everywhere(sharding.ranks(), sharding.batch());
    std::vector<T> whole(static_cast<std::size_t>(sharding.batch().tokens() * width));
    exchange(relayout(sharding, everywhere, comm.rank()), cpx::sharded(local, sharding, comm.rank()),
             cpx::sharded(cpx::rows<T>(whole, width), everywhere, comm.rank()), comm);
    return whole;
}

/// Calls `f(input, output)` with the job's sharding of rows of some sections: by tokens both are the same.
template <class F>
void with_sharding(job const& j, std::vector<cpx::section> const& in, std::vector<cpx::section> const& out, F&& f) {
    if (j.by_heads()) return f(cpx::head_sharded<>(j.ranks, j.batch, in), cpx::head_sharded<>(j.ranks, j.batch, out));
    examples::with_token_sharding(j.batch, j.layout, j.cut, j.ranks,
                                  [&](auto const& sharding) { f(sharding, sharding); });
}

/// Calls `f(carry)`. By heads no sequence is cut and nothing is handed on: one carry is enough for `S`.
template <class S, class F>
void with_carry(job const& j, F&& f) {
    if constexpr (!S::every_row)
        if (j.serial) return f(cpx::serial());
    f(cpx::scan());
}

/// What a file has of a gated delta rule.
template <class T>
struct delta_rule_inputs {
    static constexpr char const* names[] = {"q", "k", "v", "g", "beta"};

    cpx::delta_rule_heads heads;
    cpx::delta_rule_options options;
    std::vector<cpx::section> in, out;
    cpx::index_t width;  ///< of a row that holds q, k, v, g and beta of a token, so that they are sharded together
    std::vector<T> rows; ///< such rows
    std::vector<T> dout; ///< none if the file has no gradients

    /// Calls `f(name, columns)` for each of them, of rows of all.
    template <class A, class F>
    void each(cpx::rows<A> of_all, F&& f) const {
        cpx::index_t first = 0;
        for (std::size_t i = 0; i < in.size(); ++i) {
            cpx::index_t const columns = in[i].heads * in[i].width;
            f(names[i], of_all.columns(std::exchange(first, first + columns), columns));
        }
    }
};

template <class T>
delta_rule_inputs<T> read_delta_rule(job const& j) {
    auto const &q = j.file.tensor("q").shape, &v = j.file.tensor("v").shape;
    cpx::require(q.size() == 3 && v.size() == 3, j.file.where().c_str(), "axes of q and v", "3 and 3",
                 std::to_string(q.size()) + " and " + std::to_string(v.size()));
    cpx::delta_rule_heads const heads{q[1], v[1], q[2], v[2]};
    check_sizes(j, {{"key heads", heads.key_heads},
                    {"value heads", heads.value_heads},
                    {"width of a key head", heads.key_dim},
                    {"width of a value head", heads.value_dim}});
    if (j.file.metadata().contains("scale")) // the only one that cpx's default is
        cpx::require(j.file.metadata("scale") == std::to_string(heads.key_dim) + "**-0.5", j.file.where().c_str(),
                     "scale in the metadata", std::to_string(heads.key_dim) + "**-0.5",
                     cpx::quote(j.file.metadata("scale")));
    cpx::section const keys{heads.key_heads, heads.key_dim}, values{heads.value_heads, heads.value_dim},
        gates{heads.value_heads, 1};
    delta_rule_inputs<T> of{
        heads,
        {.chunk = j.chunk, .qk_l2norm = choose<bool>(j, "qk_l2norm", {{"True", true}, {"False", false}})},
        {keys, keys, values, gates, gates},
        {values},
        2 * keys.heads * keys.width + values.heads * (values.width + 2),
        {},
        {}};
    std::vector<std::vector<T>> inputs; // before there is room for all: a file may name more rows than it has
    for (std::size_t i = 0; i < of.in.size(); ++i) {
        auto shape = std::vector<cpx::index_t>{j.tokens(), of.in[i].heads};
        if (i < 3) shape.push_back(of.in[i].width);
        inputs.push_back(j.file.read<T>(of.names[i], shape));
    }
    of.rows.resize(static_cast<std::size_t>(j.tokens() * of.width));
    auto read = inputs.begin();
    of.each(cpx::rows<T>(of.rows, of.width), [&](char const*, cpx::rows<T> to) {
        cpx::as_matrix(to) = cpx::as_matrix(cpx::rows<T const>(*read++, to.width()));
    });
    if (j.file.contains("do")) of.dout = j.file.read<T>("do", {j.tokens(), values.heads, values.width});
    return of;
}

template <class T>
outputs<T> gated_delta_rule(job const& j) {
    auto const of = read_delta_rule<T>(j);
    auto const& heads = of.heads;
    cpx::index_t const out_width = heads.value_heads * heads.value_dim;
    bool const backward = j.file.contains("do");

    outputs<T> result;
    cpx::index_t const state = heads.key_dim * heads.value_dim;
    auto& final_state = result["final_state"];
    final_state.resize(
        j.file.read<T>("final_state", {j.batch.sequences(), heads.value_heads, heads.key_dim, heads.value_dim}).size());
    std::mutex guard;
    auto const run = [&]<class S, class How>(S const& sharding, S const& out_sharding, How) {
        cpx::threads::run(j.ranks, [&](cpx::threads& comm) {
            int const rank = comm.rank();
            auto const local = take(of.rows, of.width, sharding, comm);
            cpx::range const values = sharding.heads(rank, heads.value_heads);
            cpx::index_t const k = sharding.heads(rank, heads.key_heads).size() * heads.key_dim, n = values.size();
            cpx::tensor<T, S> o(sharding, rank, n * heads.value_dim);
            cpx::index_t const local_state = n * state;
            std::vector<T> finals(static_cast<std::size_t>(j.batch.sequences() * local_state));
            auto const x = local.view();
            cpx::index_t const v_end = 2 * k + n * heads.value_dim;
            auto const plan = cpx::carry<How>(sharding, rank);
            cpx::delta_rule_saved<T> saved;
            cpx::delta_rule_tensors<T, S> const tensors{x.columns(0, k),
                                                        x.columns(k, k),
                                                        x.columns(2 * k, v_end - 2 * k),
                                                        x.columns(v_end, n),
                                                        x.columns(v_end + n, n),
                                                        o.view(),
                                                        {},
                                                        {finals.data(), j.batch.sequences(), local_state},
                                                        &saved};
            cpx::gated_delta_rule(plan, tensors, heads, of.options, comm);
            auto all = gather<T>(o.data(), out_width, out_sharding, comm);

            std::vector<T> gradients;
            if (backward) {
                cpx::tensor<T, S> d(sharding, rank, local.width());
                auto const d_out = take(of.dout, out_width, out_sharding, comm);
                auto const dx = d.view();
                cpx::gated_delta_rule_backward(plan, tensors,
                                               cpx::delta_rule_gradient_tensors<T, S>{{d_out.data(), sharding, rank},
                                                                                      dx.columns(0, k),
                                                                                      dx.columns(k, k),
                                                                                      dx.columns(2 * k, v_end - 2 * k),
                                                                                      dx.columns(v_end, n),
                                                                                      dx.columns(v_end + n, n)},
                                               heads, of.options, comm);
                gradients = gather<T>(d.data(), of.width, sharding, comm);
            }
            std::lock_guard const lock(guard);
            for (std::size_t i = 0; i < plan.segments.size(); ++i) { // a final state is where its sequence ends
                if (plan.links[i].beside(cpx::side::after) > 0) continue;
                cpx::index_t const s = plan.segments[i].sequence;
                std::copy_n(finals.data() + s * local_state, local_state,
                            final_state.data() + (s * heads.value_heads + values.first) * state);
            }
            if (rank != 0) return;
            result["o"] = std::move(all);
            if (!backward) return;
            of.each(cpx::rows<T>(gradients, of.width), [&](char const* name, cpx::rows<T> from) {
                auto& gradient = result[std::string("d") + name];
                gradient.resize(static_cast<std::size_t>(from.count() * from.width()));
                cpx::as_matrix(cpx::rows<T>(gradient, from.width())) = cpx::as_matrix(from);
            });
        });
    };
    with_sharding(j, of.in, of.out, [&]<class S>(S const& sharding, S const& out_sharding) {
        with_carry<S>(j, [&](auto carry) { run(sharding, out_sharding, carry); });
    });
    return result;
}

template <class T>
outputs<T> causal_conv1d(job const& j) {
    auto const x = j.file.read<T>("x", {j.tokens(), -1});
    cpx::index_t const channels = j.file.tensor("x").shape[1];
    auto const weight = j.file.read<T>("weight", {channels, -1});
    cpx::index_t const taps = j.file.tensor("weight").shape[1];
    check_sizes(j, {{"channels", channels}, {"taps", taps}});
    auto const bias = j.file.contains("bias") ? j.file.read<T>("bias", {channels}) : std::vector<T>();
    auto const act =
        choose<cpx::activation>(j, "activation", {{"silu", cpx::activation::silu}, {"None", cpx::activation::none}});
    std::vector<cpx::section> const sections{{channels, 1}}; // by heads, every channel is one
    bool const backward = j.file.contains("dy");
    auto const dy = backward ? j.file.read<T>("dy", {j.tokens(), channels}) : std::vector<T>();

    outputs<T> result;
    with_sharding(j, sections, sections, [&](auto const& sharding, auto const&) {
        cpx::threads::run(j.ranks, [&](cpx::threads& comm) {
            int const rank = comm.rank();
            auto const local = take(x, channels, sharding, comm);
            auto const local_weight = local_rows(sharding, rank, sections, cpx::rows<T const>(weight, taps));
            auto const local_bias =
                bias.empty() ? bias : local_rows(sharding, rank, sections, cpx::rows<T const>(bias, 1));
            auto y = local;
            auto const before = halo(sharding, rank, taps - 1),
                       after = halo(sharding, rank, taps - 1, cpx::side::after);
            cpx::causal_conv1d(before, local.view(), cpx::rows<T const>(local_weight, taps),
                               std::span<T const>(local_bias), act, y.view(), comm);
            auto all = gather<T>(y.data(), channels, sharding, comm);
            if (rank == 0) result["y"] = std::move(all);
            if (!backward) return;

            auto const d_out = take(dy, channels, sharding, comm);
            auto dx = local;
            std::vector<T> dlocal(local_weight.size()), dlocal_bias(local_bias.size());
            cpx::causal_conv1d_backward(
                before, after, local.view(), cpx::rows<T const>(local_weight, taps), std::span<T const>(local_bias),
                act, d_out.view(),
                cpx::causal_conv1d_gradients{dx.view(), cpx::rows(dlocal, taps), std::span(dlocal_bias)}, comm);
            auto dx_all = gather<T>(dx.data(), channels, sharding, comm);
            auto const sum = [&](std::vector<T> const& own,
                                 cpx::index_t columns) { // over this rank's channels, then ranks
                std::vector<T> total(static_cast<std::size_t>(channels * columns));
                add_local_rows(sharding, rank, sections, cpx::rows(own, columns), cpx::rows(total, columns));
                sum_over_ranks(std::span(total), comm);
                return total;
            };
            auto dweight = sum(dlocal, taps), dbias = bias.empty() ? std::vector<T>() : sum(dlocal_bias, 1);
            if (rank != 0) return;
            result["dx"] = std::move(dx_all);
            result["dweight"] = std::move(dweight);
            if (!bias.empty()) result["dbias"] = std::move(dbias);
        });
    });
    return result;
}

/// Hidden states are sharded by tokens: as the layout says, or zigzag where it asks for the recurrence by heads.
template <class T>
outputs<T> gdn_layer(job const& j) {
    auto const config = cpx::json_value::parse(j.file.metadata("config"), j.file.where() + ", metadata config");
    auto const get = [&](char const* key) { return config.template get<cpx::index_t>(key); };
    cpx::gated_delta_net_config const net{get("hidden_size"),
                                          {get("linear_num_key_heads"), get("linear_num_value_heads"),
                                           get("linear_key_head_dim"), get("linear_value_head_dim")},
                                          get("linear_conv_kernel_dim"),
                                          j.chunk,
                                          config.template get<T>("rms_norm_eps")};
    check_sizes(j, {{"hidden_size", net.hidden},
                    {"linear_num_key_heads", net.heads.key_heads},
                    {"linear_num_value_heads", net.heads.value_heads},
                    {"linear_key_head_dim", net.heads.key_dim},
                    {"linear_value_head_dim", net.heads.value_dim},
                    {"linear_conv_kernel_dim", net.kernel}});
    auto const act = config.template get<std::string>("hidden_act");
    cpx::require(act == "silu", config.where().c_str(), "hidden_act", "\"silu\"", cpx::quote(act));
    auto const x = j.file.read<T>("hidden_states", {j.tokens(), net.hidden});
    auto const order = cpx::sum_order::by_rank;
    bool const backward = j.file.contains("d_output");
    auto const dy = backward ? j.file.read<T>("d_output", {j.tokens(), net.hidden}) : std::vector<T>();
    std::map<std::string, std::vector<T>> values;
    cpx::gated_delta_net_weights<T> w;
    for_each_parameter(w, net, [&](std::string const& name, auto& weight, cpx::index_t count, cpx::index_t width) {
        check_shape(j, "weight." + name, {count, width});
        auto const& read = values[name] = j.file.read<T>("weight." + name);
        weight = {read.data(), count, width};
    });

    outputs<T> result;
    auto const run = [&](auto const& sharding, auto const& make_layer) {
        using S = std::remove_cvref_t<decltype(sharding)>;
        cpx::threads::run(j.ranks, [&](cpx::threads& comm) {
            auto const local = take(x, net.hidden, sharding, comm);
            auto y = local, dx = local;
            auto const layer = make_layer(comm.rank());
            typename std::remove_cvref_t<decltype(layer)>::template saved_of<T> saved;
            layer(w, local.view(), y.view(), comm, {{}, &saved});
            auto all = gather<T>(y.data(), net.hidden, sharding, comm);
            if (comm.rank() == 0) result["output"] = std::move(all);
            if (!backward) return;

            std::map<std::string, std::vector<T>> gradients;
            cpx::gated_delta_net_gradients<T, S> to{dx.view(), {}, order};
            for_each_parameter(to.weights, net,
                               [&](std::string const& name, auto& g, cpx::index_t n, cpx::index_t width) {
                                   auto& sum = gradients["grad." + name];
                                   sum.resize(static_cast<std::size_t>(n * width));
                                   g = {sum.data(), n, width};
                               });
            auto const d_output = take(dy, net.hidden, sharding, comm);
            gated_delta_net_backward(layer, w, local.view(), saved, d_output.view(), to, comm);
            for (auto& [name, sum] : gradients) sum_over_ranks(std::span(sum), comm);
            gradients["d_hidden_states"] = gather<T>(dx.data(), net.hidden, sharding, comm);
            if (comm.rank() == 0) result.merge(gradients);
        });
    };
    if (j.by_heads()) {
        using S = examples::token_sharding<cpx::scope::sequence>;
        S const tokens(j.batch, cpx::table(cpx::zigzag<>(j.ranks)),
                       cpx::aligned<cpx::dynamic>(std::max(j.cut.unit, 1)));
        cpx::head_sharded<> const mix(j.ranks, j.batch, net.sections()), back(j.ranks, j.batch, net.output_sections());
        run(tokens, [&](int rank) {
            return cpx::gated_delta_net(cpx::carry<cpx::scan>(mix, rank), relayout(tokens, mix, rank),
                                        relayout(back, tokens, rank), net);
        });
        return result;
    }
    examples::with_token_sharding(j.batch, j.layout, j.cut, j.ranks, [&]<class S>(S const& sharding) {
        with_carry<S>(j, [&]<class How>(How) {
            run(sharding, [&](int rank) { return cpx::gated_delta_net(cpx::carry<How>(sharding, rank), net); });
        });
    });
    return result;
}

} // namespace verify
