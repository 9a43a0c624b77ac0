// SPDX-License-Identifier: Apache-2.0
// Where a world rank stands under every parallelism of a training job.
#pragma once

#include <cpx/core/error.hpp>
#include <cpx/core/index.hpp>
#include <cpx/core/refused.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace cpx {

/// Axes of a mesh, and sets of them: `axis::dp | axis::cp`.
///
/// Dense layers have tensor, context, data and pipeline parallelism (tp, cp, dp, pp); layers of experts have etp, ep,
/// edp and the same pp. cp is made of ulysses, its inner axis, and ring.
enum class axis : unsigned { tp = 1, ulysses = 2, ring = 4, cp = 6, dp = 8, pp = 16, etp = 32, ep = 64, edp = 128 };

constexpr axis operator|(axis a, axis b) { return axis{static_cast<unsigned>(a) | static_cast<unsigned>(b)}; }

/// Sizes of a mesh. dp and edp are what remains.
struct mesh_sizes {
    detail::by_name names{}; ///< none: sizes have names, `{8, 2}` is no mesh_sizes
    int world = 1;
    int tp = 1, cp = 1, pp = 1;
    int ep = 1, etp = 0; ///< of experts; etp 0: not given, see `etp_of`
    int ulysses = 1;     ///< inner axis of cp: neighbours
    int chunks = 1;      ///< of layers that a pipeline rank has: more than 1 is a virtual pipeline
    /// Neighbours first, Megatron's by default. Experts have etp where tp stands, edp where dp does, and no cp.
    std::array<axis, 5> order{axis::tp, axis::cp, axis::ep, axis::dp, axis::pp};
};

/// Returns over how many ranks the weights of one expert are divided. This is the rule for all that has a mesh: etp
/// where it is given; where it is not, tp, as in Megatron, but 1 in a true-on-policy job of a mixture of experts.
///
/// Such jobs leave experts whole (miles, pull request 1088: tp 2, pp 2, ep 2 is `_tp2_pp2_ep2_etp1`): their plan tells
/// Megatron so, and gives it to their mesh: `plan_on_policy`, `with_plan`.
constexpr int etp_of(mesh_sizes const& sizes, bool true_on_policy = false) {
    return sizes.etp != 0 ? sizes.etp : true_on_policy ? 1 : sizes.tp;
}

/// The ranks of a training job, arranged once for dense layers and once for experts.
///
/// Pure arithmetic, a constant where its sizes are: `constexpr mesh all({.world = 8, .cp = 2, .ep = 8, .etp = 1})`.
/// World ranks count from 0 as torchrun's and MPI's do; `rank` elsewhere in cpx is a coordinate here, on cp.
/// Members throw `cpx::error` for a rank outside the world, and for axes of dense layers and of experts in one set.
class mesh {
public:
    /// Throws `cpx::error` if sizes do not divide the world's, or if dense layers and experts would have other pipeline
    /// groups, which an order that ends with pp does not let happen.
    explicit constexpr mesh(mesh_sizes const& sizes, caller here = caller::here())
        : world_(sizes.world), chunks_(sizes.chunks) {
        int const etp = etp_of(sizes);
        for (auto const& [name, size] : std::array<std::pair<char const*, int>, 8>{{{"world", sizes.world},
                                                                                    {"tp", sizes.tp},
                                                                                    {"cp", sizes.cp},
                                                                                    {"pp", sizes.pp},
                                                                                    {"ep", sizes.ep},
                                                                                    {"etp", etp},
                                                                                    {"ulysses", sizes.ulysses},
                                                                                    {"chunks", sizes.chunks}}})
            if (size < 1) throw error("mesh", name, "at least 1", std::to_string(size), here);
        if (sizes.cp % sizes.ulysses != 0)
            throw error("mesh", "cp", "a multiple of ulysses = " + std::to_string(sizes.ulysses),
                        std::to_string(sizes.cp), here);
        int const dp = remaining("tp, cp, pp", {sizes.tp, sizes.cp, sizes.pp}, here),
                  edp = remaining("etp, ep, pp", {etp, sizes.ep, sizes.pp}, here);
        for (axis const each : {axis::tp, axis::cp, axis::ep, axis::dp, axis::pp})
            if (auto const times = std::ranges::count(sizes.order, each); times != 1)
                throw error("mesh", "order", "tp, cp, ep, dp and pp, each once",
                            names_of(each) + ' ' + std::to_string(times) + " times", here);
        for (axis const a : sizes.order) {
            if (a == axis::tp) add(dense_, a, sizes.tp), add(experts_, axis::etp, etp);
            if (a == axis::cp)
                add(dense_, axis::ulysses, sizes.ulysses), add(dense_, axis::ring, sizes.cp / sizes.ulysses);
            if (a == axis::ep) add(experts_, a, sizes.ep);
            if (a == axis::dp) add(dense_, a, dp), add(experts_, axis::edp, edp);
            if (a == axis::pp) add(dense_, a, sizes.pp), add(experts_, a, sizes.pp);
        }
        if (sizes.pp > 1 && dense_.of(axis::pp).stride != experts_.of(axis::pp).stride)
            throw error("mesh", "order",
                        "one that gives dense layers and experts the same pipeline groups, as with pp last",
                        "groups of ranks " + std::to_string(dense_.of(axis::pp).stride) + " and " +
                            std::to_string(experts_.of(axis::pp).stride) + " apart",
                        here);
    }

    template <class... X>
    constexpr mesh(X const&...) { // also of numbers in braces, which no mesh_sizes takes
        static_assert(detail::never<X...>, "cpx: mesh wants its sizes by name: mesh({.world = 8, .cp = 2})");
    }

    template <class X>
        requires(!std::convertible_to<X const&, caller>)
    constexpr mesh(mesh_sizes const&, X const&, detail::any = {}) {
        static_assert(detail::never<X>, "cpx: mesh wants its sizes by name, and nothing else: "
                                        "mesh({.world = 8, .cp = 2})");
    }

    constexpr int world() const { return world_; }
    /// Returns how many ranks a group of these axes has.
    constexpr int size(axis set, caller here = caller::here()) const { return members("mesh::size", set, here); }

    /// Returns where a rank stands in its group of these axes, from 0: on the first axis of the order fastest.
    constexpr int coordinate(axis set, int world_rank, caller here = caller::here()) const {
        return number("mesh::coordinate", set, true, world_rank, here);
    }
    /// Returns the number of its group: what the communicators' `split` take. From 0, without gaps.
    constexpr int color(axis set, int world_rank, caller here = caller::here()) const {
        return number("mesh::color", set, false, world_rank, here);
    }
    /// Returns the world rank that stands at `coordinate` in group `color` of these axes.
    constexpr int world_rank(axis set, int color, int coordinate, caller here = caller::here()) const {
        char const* const where = "mesh::world_rank";
        int const count = members(where, set, here);
        require_below(where, "coordinate", coordinate, count, here);
        require_below(where, "color", color, world_ / count, here);
        return member(set, color, coordinate, here);
    }
    /// Returns the world ranks of the group of a rank, by their coordinates.
    std::vector<int> group(axis set, int world_rank, caller here = caller::here()) const {
        char const* const where = "mesh::group";
        std::vector<int> ranks(static_cast<std::size_t>(members(where, set, here)));
        int const own = number(where, set, false, world_rank, here);
        for (std::size_t i = 0; i < ranks.size(); ++i) ranks[i] = member(set, own, static_cast<int>(i), here);
        return ranks;
    }

    /// Returns a color of those of a group that share a node with a rank: the lowest world rank of them. Ranks of a
    /// node are neighbours.
    constexpr int color_in_node(axis set, int world_rank, int ranks_per_node, caller here = caller::here()) const {
        return lowest_in_node("mesh::color_in_node", set, world_rank, ranks_per_node, here);
    }
    /// Returns whether all groups of these axes stay within nodes.
    constexpr bool within_nodes(axis set, int ranks_per_node, caller here = caller::here()) const {
        char const* const where = "mesh::within_nodes";
        for (int r = 0; r < world_; ++r)
            if (lowest_in_node(where, set, r, ranks_per_node, here) !=
                member(set, number(where, set, false, r, here), 0, here))
                return false;
        return true;
    }

    /// Returns the layers of a rank, of so many in all: those of one chunk of a virtual pipeline, which goes through
    /// all pipeline ranks before the next chunk begins. Throws unless every chunk of every rank has as many.
    constexpr range layers(index_t all, int world_rank, int chunk = 0, caller here = caller::here()) const {
        char const* const where = "mesh::layers";
        require_below(where, "chunk of layers", chunk, chunks_, here);
        index_t const pp = members(where, axis::pp, here), at = number(where, axis::pp, true, world_rank, here);
        return share(where, "layers", all, pp * chunks_, chunk * pp + at, "pipeline stages", here);
    }
    /// Returns the experts of a rank, of so many a layer. Throws unless ep divides them.
    constexpr range experts(index_t all, int world_rank, caller here = caller::here()) const {
        return share("mesh::experts", "experts", all, axis::ep, "ep", world_rank, here);
    }
    /// Returns which sequences of a step a rank loads: tp, cp and pp do not multiply them, their ranks load the same.
    /// Throws unless dp divides them.
    constexpr range sequences(index_t step, int world_rank, caller here = caller::here()) const {
        return share("mesh::sequences", "sequences of a step", step, axis::dp, "dp", world_rank, here);
    }
    /// Returns in how many micro-batches a rank takes its sequences of a step. Throws unless all are whole.
    constexpr index_t accumulation_steps(index_t step, index_t micro_batch, caller here = caller::here()) const {
        char const* const where = "mesh::accumulation_steps";
        index_t const own = share(where, "sequences of a step", step, axis::dp, "dp", 0, here).size();
        if (micro_batch < 1 || own % micro_batch != 0)
            throw error(where, "sequences of a micro-batch", "a divisor of a rank's " + std::to_string(own),
                        std::to_string(micro_batch), here);
        return own / micro_batch;
    }

private:
    /// World ranks that differ by one on an axis are `stride` apart.
    struct digit {
        axis of{};
        int size = 1, stride = 1;
    };
    /// Axes from the innermost on; those that are not used have one rank.
    struct grid {
        std::array<digit, 5> digits{};
        std::size_t count = 0;
        int ranks = 1;
        constexpr digit const& of(axis a) const {
            std::size_t i = 0;
            while (digits[i].of != a) ++i;
            return digits[i];
        }
    };

    static constexpr void add(grid& to, axis a, int size) {
        to.digits[to.count++] = {a, size, to.ranks};
        to.ranks *= size;
    }
    static constexpr bool has(axis set, axis one) {
        return (static_cast<unsigned>(set) & static_cast<unsigned>(one)) != 0;
    }
    static std::string names_of(axis set) {
        std::string text;
        for (auto const& [one, name] : std::array<std::pair<axis, char const*>, 7>{{{axis::tp, "tp"},
                                                                                    {axis::cp, "cp"},
                                                                                    {axis::dp, "dp"},
                                                                                    {axis::pp, "pp"},
                                                                                    {axis::etp, "etp"},
                                                                                    {axis::ep, "ep"},
                                                                                    {axis::edp, "edp"}}})
            if (has(set, one)) text += (text.empty() ? "" : ", ") + std::string(name);
        return text;
    }
    constexpr int remaining(char const* names, std::array<int, 3> const& sizes, caller here) const {
        index_t product = 1;
        for (int const size : sizes) product = product > world_ ? product : product * size;
        if (world_ % product != 0)
            throw error("mesh", "ranks of the world",
                        "a multiple of " + std::string(names) + " = " + std::to_string(sizes[0]) + " x " +
                            std::to_string(sizes[1]) + " x " + std::to_string(sizes[2]),
                        std::to_string(world_), here);
        return static_cast<int>(world_ / product);
    }
    constexpr grid const& grid_of(char const* where, axis set, caller here) const {
        bool const dense = has(set, axis::tp | axis::cp | axis::dp),
                   experts = has(set, axis::etp | axis::ep | axis::edp);
        if (dense && experts)
            throw error(where, "axes", "those of dense layers or those of experts", names_of(set), here);
        if (auto const unknown = static_cast<unsigned>(set) >> 8; unknown != 0)
            throw error(where, "axes", "tp, cp, dp, pp, etp, ep or edp", "bit " + std::to_string(unknown << 8), here);
        return experts ? experts_ : dense_;
    }
    /// Returns how many ranks a group has.
    constexpr int members(char const* where, axis set, caller here) const {
        int product = 1;
        for (digit const& d : grid_of(where, set, here).digits)
            if (has(set, d.of)) product *= d.size;
        return product;
    }
    /// Returns the coordinate in a group, `inside`, or the number of the group.
    constexpr int number(char const* where, axis set, bool inside, int world_rank, caller here) const {
        require_below(where, "world rank", world_rank, world_, here);
        int result = 0, weight = 1;
        for (digit const& d : grid_of(where, set, here).digits) {
            if (has(set, d.of) != inside) continue;
            result += world_rank / d.stride % d.size * weight;
            weight *= d.size;
        }
        return result;
    }
    /// Returns the world rank at a coordinate of a group that are checked.
    constexpr int member(axis set, int color, int coordinate, caller here) const {
        int rank = 0;
        for (digit const& d : grid_of("mesh", set, here).digits) {
            int& rest = has(set, d.of) ? coordinate : color;
            rank += rest % d.size * d.stride;
            rest /= d.size;
        }
        return rank;
    }
    constexpr int lowest_in_node(char const* where, axis set, int world_rank, int ranks_per_node, caller here) const {
        if (ranks_per_node < 1)
            throw error(where, "ranks of a node", "at least 1", std::to_string(ranks_per_node), here);
        int const own = number(where, set, false, world_rank, here), node = world_rank / ranks_per_node;
        int lowest = world_rank;
        for (int i = 0; i < members(where, set, here); ++i)
            if (int const other = member(set, own, i, here); other / ranks_per_node == node && other < lowest)
                lowest = other;
        return lowest;
    }
    static constexpr void require_below(char const* where, char const* what, int number, int count, caller here) {
        if (number < 0 || number >= count)
            throw error(where, what, "0 to " + std::to_string(count - 1), std::to_string(number), here);
    }
    /// Returns the share of so many things that one of `ranks` has; of an axis that the rank which stands there has.
    static constexpr range share(char const* where, char const* what, index_t all, index_t ranks, index_t rank,
                                 char const* of, caller here) {
        if (all < 0 || all % ranks != 0)
            throw error(where, what,
                        std::string(all < 0 ? "not negative, " : "") + "a multiple of " + of + " = " +
                            std::to_string(ranks),
                        std::to_string(all), here);
        return {rank * (all / ranks), (rank + 1) * (all / ranks)};
    }
    constexpr range share(char const* where, char const* what, index_t all, axis over, char const* name, int world_rank,
                          caller here) const {
        return share(where, what, all, members(where, over, here), number(where, over, true, world_rank, here), name,
                     here);
    }

    int world_ = 1, chunks_ = 1;
    grid dense_, experts_;
};

} // namespace cpx
