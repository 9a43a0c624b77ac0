// SPDX-License-Identifier: Apache-2.0
// In what two plans differ, as errors say it: of batches the first offset, though an identity has but a hash of them.
#pragma once

#include <cpx/core/thd.hpp>
#include <cpx/plan/identity.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

namespace cpx::detail {

/// The batches of the plans that this process has compared or run last, some hundred of them. Any thread may call.
class known_batches {
public:
    /// Called before every exchange: a plan that was compared long ago is known while it runs.
    static void note(thd const& batch) {
        static thread_local std::uint64_t last = 0;
        if (last == batch.hash()) return; // layers run plans of one batch
        known_batches& all = here();
        std::scoped_lock const lock(all.guard_);
        last = batch.hash();
        entry* place = all.place_of(last);
        if (!place) place = &*std::ranges::min_element(all.entries_, {}, &entry::used);
        if (place->hash != last || !place->batch) *place = {last, 0, batch};
        place->used = ++all.notes_;
    }
    static std::optional<thd> find(std::uint64_t hash) {
        known_batches& all = here();
        std::scoped_lock const lock(all.guard_);
        entry const* const place = all.place_of(hash);
        return place ? place->batch : std::nullopt;
    }

private:
    struct entry {
        std::uint64_t hash = 0, used = 0; ///< the number of the note that was the last of this batch
        std::optional<thd> batch = {};
    };

    static known_batches& here() {
        static known_batches all;
        return all;
    }
    entry* place_of(std::uint64_t hash) {
        auto const found = std::ranges::find_if(entries_, [&](entry const& e) { return e.hash == hash && e.batch; });
        return found == entries_.end() ? nullptr : &*found;
    }

    std::mutex guard_;
    std::array<entry, 128> entries_;
    std::uint64_t notes_ = 0;
};

/// The first field in which two identities differ; where that tells of batches which this process knows, the first
/// offset, or else valid length.
class difference {
public:
    difference(identity const& mine, identity const& theirs)
        : field_(mine.first_difference(theirs)), batch_(mine.numbers[identity::cu_seqlens]),
          of_batches_(needs_batch(field_) && batch_ != 0 && theirs.numbers[identity::cu_seqlens] != 0) {
        if (field_ < 0) return;
        name_ = mine.name(field_);
        if (!of_batches_) return;
        auto const a = batch_of(mine), b = batch_of(theirs);
        if (!a || !b) return;
        for (bool const valid : {false, true})
            for (index_t i = 0; !number_ && i < std::max(a->sequences(), b->sequences()) + !valid; ++i)
                if (value(*a, i, valid) != value(*b, i, valid)) number_ = i, valid_ = valid;
        if (number_)
            name_ = (valid_ ? "the valid length of sequence " : "offset ") + std::to_string(*number_) +
                    (valid_ ? "" : " of cu_seqlens");
    }

    /// Returns whether there is none.
    bool empty() const { return field_ < 0; }
    /// Returns whether it is as said above; not, where batches differ of which this process does not know both.
    bool exact() const { return !of_batches_ || number_; }
    std::string const& name() const { return name_; }
    /// Returns what a plan has there.
    std::string value(identity const& of) const {
        if (!number_ && field_ == of_hash) return of.numbers[identity::cu_seqlens] == batch_ ? "one batch" : "another";
        if (!number_) return of.value(field_);
        auto const batch = batch_of(of);
        return batch ? value(*batch, *number_, valid_) : "another";
    }

private:
    static constexpr int of_hash = identity::texts + static_cast<int>(identity::cu_seqlens);
    /// Returns whether a field sums up the batch, and is none of its first offsets.
    static bool needs_batch(int field) {
        int const offset = field - identity::texts - static_cast<int>(identity::first_offset);
        int const last = static_cast<int>(identity::last_offset) - static_cast<int>(identity::first_offset);
        return identity::of_batch(field) && (offset < 0 || offset > last);
    }
    static std::optional<thd> batch_of(identity const& id) {
        return known_batches::find(id.numbers[identity::cu_seqlens]);
    }
    static std::string value(thd const& batch, index_t i, bool valid) {
        if (i >= batch.sequences() + !valid) return "none";
        return std::to_string(valid ? batch.valid(i) : batch.offset(i));
    }

    int field_;
    std::uint64_t batch_; ///< its hash, 0 of no batch
    bool of_batches_;
    std::string name_ = {};
    std::optional<index_t> number_ = {}; ///< of the offset, or valid length
    bool valid_ = false;
};

} // namespace cpx::detail
