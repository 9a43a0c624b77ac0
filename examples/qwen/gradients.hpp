// SPDX-License-Identifier: Apache-2.0
// The gradients of all weights and features of a pass.
#pragma once

#include "outcome.hpp"

#include <cpx/core/row_buffer.hpp>
#include <cpx/transport/sum.hpp>

#include <map>

namespace qwen {

using cpx::index_t;

/// One rank's shares of them, in its memory, until they are summed: wide, whatever the elements of weights are.
template <class R>
class gradients {
    using T = cpx::wide<typename R::element>;

public:
    gradients(R& rank, std::vector<features> const& of_media)
        : rank_(rank), tied_(*rank.model.config.tie_word_embeddings) {
        index_t first = 0;
        auto const add = [&](std::string const& name, index_t rows, index_t columns) {
            places_[name] = {first, rows, columns};
            first += (rows * columns + 3) / 4 * 4; // each as aligned as the first
        };
        auto const add_weight = [&](std::string const& name, auto const& weight) {
            add(name, weight.count(), weight.width());
        };
        rank.model.each(add_weight);
        // What head and embedding add to a weight that they share lies on different ranks: two sums, added at the end.
        if (tied_) add_weight(head, rank.model.weight(head));
        index_t const hidden = *rank.model.config.hidden_size;
        for (features const& f : of_media) add(f.name, std::ssize(f.values) / hidden, hidden);
        values_ = {rank.memory(), first, 1};
    }

    cpx::rows<T> of(std::string const& name) {
        auto const& p = places_.at(name);
        return {values_.view().data() + p.first, p.count, p.width};
    }
    /// Completes all of them in one call, on every rank; rank 0 returns them by name, others nothing. Collective.
    std::map<std::string, gradient<T>> sum() {
        std::span<T> const all(values_.view().data(), static_cast<std::size_t>(values_.count()));
        cpx::sum_over_ranks(all, rank_.comm);
        if (rank_.rank() != 0) return {};
        auto const values = rank_.memory().read(std::span<T const>(all));
        std::map<std::string, gradient<T>> result;
        for (auto const& [name, p] : places_) {
            auto const begin = values.begin() + p.first;
            result[name] = {p.width, {begin, begin + p.count * p.width}};
        }
        if (!tied_) return result;
        auto& embedding = result.at("model.embed_tokens.weight").values;
        for (std::size_t i = 0; i < embedding.size(); ++i) embedding[i] += result.at(head).values[i];
        result.erase(head);
        return result;
    }

private:
    static constexpr char const* head = "lm_head.weight";
    struct place {
        index_t first, count, width;
    };
    R& rank_;
    bool tied_;
    std::map<std::string, place> places_;
    cpx::row_buffer<T, typename R::memory_type> values_;
};

} // namespace qwen
