// SPDX-License-Identifier: Apache-2.0
// Runs the plans of all ranks in one thread, by the meaning of their messages and without cpx's exchange.
#pragma once

#include <cpx/plan/plan.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace support {

/// Returns "" if what every rank sends is what its peers receive, message by message and run by run.
inline std::string disagreement(std::vector<cpx::plan> const& plans) {
    auto const alike = [](std::vector<cpx::run> const& a, std::vector<cpx::run> const& b) {
        bool same = a.size() == b.size();
        for (std::size_t i = 0; same && i < a.size(); ++i) same = a[i].count == b[i].count;
        return same;
    };
    std::size_t sent = 0, received = 0;
    for (cpx::plan const& p : plans) {
        sent += p.sends.size();
        received += p.receives.size();
        for (auto const* messages : {&p.sends, &p.receives})
            for (std::size_t i = 1; i < messages->size(); ++i)
                if ((*messages)[i].peer <= (*messages)[i - 1].peer)
                    return "rank " + std::to_string(p.rank) + " has two messages with a peer, or out of order";
        for (cpx::message const& out : p.sends) {
            auto const& receives = plans[static_cast<std::size_t>(out.peer)].receives;
            auto const in = std::ranges::find(receives, p.rank, &cpx::message::peer);
            auto const who = [&] { return std::to_string(p.rank) + " to " + std::to_string(out.peer); };
            if (in == receives.end()) return "nobody expects the message " + who();
            if (!alike(in->rows, out.rows) || !alike(in->columns, out.columns))
                return "the two ends of the message " + who() + " list other runs";
            for (auto const* runs : {&out.rows.all(), &out.columns, &in->rows.all(), &in->columns})
                for (cpx::run const& r : *runs)
                    if (r.count <= 0 || r.first < 0) return "an empty run in the message " + who();
        }
    }
    return sent == received ? "" : "somebody expects a message that nobody sends";
}

/// Returns what `f(sender's place, receiver's place)` visits: all cells of a message, in the order of both ends.
template <class F>
void for_each_cell(std::vector<cpx::run> const& from, std::vector<cpx::run> const& to, F&& f) {
    for (std::size_t i = 0; i < from.size(); ++i)
        for (cpx::index_t k = 0; k < from[i].count; ++k) f(from[i].first + k, to[i].first + k);
}

/// Runs an exchange: `sources[r]` is (source_rows, width) of rank r. Returns every rank's target.
///
/// Places that nothing reaches keep `untouched`, or 0 if the plan says that it leaves places out.
/// Requires plans that do not disagree.
template <class T>
std::vector<std::vector<T>> execute(std::vector<cpx::plan> const& plans, std::vector<std::vector<T>> const& sources,
                                    cpx::index_t width, T untouched) {
    std::vector<std::vector<T>> targets;
    targets.reserve(plans.size());
    std::vector<cpx::run> const all{{0, width}};
    for (cpx::plan const& p : plans) {
        bool const zero = p.kind == cpx::flow::sums || !p.covers_target();
        cpx::index_t const target_width = p.target_width ? p.target_width : width;
        std::vector<T>& target =
            targets.emplace_back(static_cast<std::size_t>(p.target_rows * target_width), zero ? T{} : untouched);
        for (cpx::message const& in : p.receives) {
            cpx::plan const& sender = plans[static_cast<std::size_t>(in.peer)];
            auto const out = std::ranges::find(sender.sends, p.rank, &cpx::message::peer);
            std::vector<T> const& source = sources[static_cast<std::size_t>(in.peer)];
            cpx::index_t const source_width = sender.source_width ? sender.source_width : width;
            for_each_cell(out->rows, in.rows, [&](cpx::index_t from_row, cpx::index_t to_row) {
                for_each_cell(out->columns.empty() ? all : out->columns, in.columns.empty() ? all : in.columns,
                              [&](cpx::index_t from_column, cpx::index_t to_column) {
                                  T const value =
                                      source.at(static_cast<std::size_t>(from_row * source_width + from_column));
                                  T& place = target.at(static_cast<std::size_t>(to_row * target_width + to_column));
                                  if (p.kind == cpx::flow::sums)
                                      place += value;
                                  else
                                      place = value;
                              });
            });
        }
    }
    return targets;
}

/// Returns the plans that move everything back.
inline std::vector<cpx::plan> transposed(std::vector<cpx::plan> const& plans) {
    std::vector<cpx::plan> list;
    list.reserve(plans.size());
    for (cpx::plan const& p : plans) list.push_back(p.transposed());
    return list;
}

} // namespace support
