// SPDX-License-Identifier: Apache-2.0
// Makes the identities of plans: what they say of shardings, in short and setting by setting.
#pragma once

#include <cpx/layout/sharding.hpp>
#include <cpx/plan/identity.hpp>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace cpx {

namespace detail {

template <any_sharding S>
std::string const& sharding_name() {
    static std::string const name = [] {
        if constexpr (requires { typename S::layout_type; })
            return std::string(type_name<typename S::layout_type>()) +
                   (S::cuts == scope::sequence ? " over sequence, " : " over batch, ") +
                   std::string(type_name<typename S::cut_type>());
        else
            return std::string(type_name<S>());
    }();
    return name;
}

/// Is given the settings of a sharding one after the other: lists them, and says of the setting at `named` what it is.
struct setting_list {
    std::vector<index_t> numbers = {};
    index_t named = -1;
    std::string name = {};

    /// `what` has a # where each of the numbers belongs: "owner of chunk #".
    void operator()(index_t number, char const* what, std::initializer_list<index_t> of = {}) {
        if (std::ssize(numbers) == named) {
            name.clear();
            for (auto next = of.begin(); *what; ++what)
                name += *what == '#' ? std::to_string(*next++) : std::string(1, *what);
        }
        numbers.push_back(number);
    }
};

/// Lets `read` read all that types do not tell: run-time sizes, owners, cuts, sections.
template <any_sharding S, class Read>
void read_settings(S const& s, Read&& read) {
    read(s.ranks(), "ranks");
    for (index_t i = 0; section const& group : s.sections()) {
        read(group.heads, "heads of section #", {i});
        read(group.width, "width of section #", {i});
        ++i;
    }
    if constexpr (!requires { typename S::layout_type; }) { // other shardings are known by their rows
        for (int rank = 0; rank < s.ranks(); ++rank) {
            read(s.rows(rank), "rows of rank #", {rank});
            if constexpr (!S::every_row)
                s.for_each_piece(rank, [&, i = index_t{0}](range piece) mutable {
                    read(piece.first, "first row of piece # of rank #", {i++, rank});
                });
        }
    } else {
        constexpr bool one_layout = layout<typename S::layout_type>; // a length rule is known by its answers
        for (index_t i = 0; i < (one_layout ? 1 : s.runs()); ++i) {
            auto const l = layout_at(s.policy(), s.runs() > 0 ? s.run(i).size() : 0);
            read(l.chunks(), one_layout ? "chunks" : "chunks of run #", {i});
            for (int c = 0; c < l.chunks(); ++c)
                read(l.owner(c), one_layout ? "owner of chunk #" : "owner of chunk # of run #", {c, i});
        }
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            read(s.cut().unit(), "unit");
        else if constexpr (!ascends<typename S::cut_type>) // a user's cut is known by its answers
            for (index_t t = 1; t < index_t{1} << 32; t *= 2)
                read(s.cut().snap(s.cut().begin(1, 3, 3 * t), 3 * t), "begin of chunk 1 of 3 in # tokens", {3 * t});
    }
}

/// Whether the numbers above follow from the type alone.
template <class S>
inline constexpr bool settled = false;
template <static_layout L, scope Scope, cut Cut>
inline constexpr bool settled<sharding<L, Scope, Cut>> = std::is_empty_v<Cut>;

/// Hashes the numbers above; those of a type once.
template <any_sharding S>
std::uint64_t sharding_hash(S const& s) {
    auto const all = [&] {
        std::uint64_t hash = 0;
        read_settings(s, [&](index_t number, char const*, std::initializer_list<index_t> = {}) {
            hash = mix(hash, static_cast<std::uint64_t>(number));
        });
        return hash;
    };
    if constexpr (settled<S>) {
        static std::uint64_t const hash = all();
        return hash;
    } else {
        return all();
    }
}

/// Tells in at most 79 characters what `hash` sums up: `text`, if that is `whole`, or its beginning and the hash.
inline std::string cut_settings(std::string text, bool whole, std::uint64_t hash) {
    if (whole && text.size() < 80) return text;
    if (text.size() > 40) text = text.substr(0, text.rfind(' ', 40)) + " ...";
    return text + (text.empty() ? "" : ", ") + "hash " + std::to_string(hash);
}

inline std::string section_settings(std::span<section const> sections) {
    std::string text;
    for (section const& group : sections)
        text += (text.empty() ? "" : ", ") + std::to_string(group.heads) + " heads of " + std::to_string(group.width);
    return text;
}

/// Tells the settings of a sharding, whose hash is the one above.
template <any_sharding S>
std::string sharding_settings(S const& s, std::uint64_t hash) {
    std::string text = section_settings(s.sections());
    if constexpr (requires { typename S::layout_type; }) {
        using L = typename S::layout_type;
        if constexpr (requires { s.cut().unit(); } && ascends<typename S::cut_type>)
            text += (text.empty() ? "unit " : ", unit ") + std::to_string(s.cut().unit());
        if constexpr (layout<L> && !std::is_empty_v<L>) { // an empty type has its owners in its name
            text += text.empty() ? "owners" : ", owners";
            for (int c = 0; c < s.policy().chunks() && text.size() < 80; ++c)
                text += ' ' + std::to_string(s.policy().owner(c));
        }
        return cut_settings(text, layout<L> && ascends<typename S::cut_type>, hash);
    } else {
        return cut_settings(text, S::every_row, hash); // its sections are all of a sharding by heads
    }
}

/// Where settings that an identity cuts short can be read. A plan is the same with it and without.
struct settings {
    struct source {
        virtual ~source() = default;
        virtual void read(setting_list& list) const = 0;
    };
    std::shared_ptr<source const> from = {};
    friend bool operator==(settings const&, settings const&) { return true; }
};

/// What an identity says of one sharding; `all`: its settings, but none if the text is all of them.
struct identity_end {
    std::string const& name;
    std::uint64_t hash;
    std::string text;
    settings all = {};
};
template <any_sharding S>
identity_end end_of(S const& s) {
    struct source final : settings::source {
        explicit source(S const& of) : sharding(of) {}
        void read(setting_list& list) const override { read_settings(sharding, list); }
        S sharding;
    };
    std::uint64_t const hash = sharding_hash(s);
    identity_end end{sharding_name<S>(), hash, sharding_settings(s, hash)};
    if (identity::cut_short(end.text)) end.all.from.reset(static_cast<settings::source const*>(new source(s)));
    return end;
}

/// Returns the identity of a plan of a batch from one sharding to another.
inline identity identify(std::string_view operation, identity_end const& from, identity_end const& to, int ranks,
                         thd const& batch, index_t parameter = 0) {
    identity id;
    identity::set(id.operation, operation);
    identity::set(id.source, from.name);
    identity::set(id.target, to.name);
    identity::set(id.source_settings, from.text);
    identity::set(id.target_settings, to.text);
    id[identity::ranks] = static_cast<std::uint64_t>(ranks);
    id[identity::source_hash] = from.hash;
    id[identity::target_hash] = to.hash;
    id[identity::parameter] = static_cast<std::uint64_t>(parameter);
    id.set_batch(batch);
    return id;
}
template <any_sharding A, any_sharding B>
identity identify(std::string_view operation, A const& from, B const& to, index_t parameter = 0) {
    return identify(operation, end_of(from), end_of(to), from.ranks(), from.batch(), parameter);
}

} // namespace detail

} // namespace cpx
