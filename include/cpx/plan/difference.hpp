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

/// The batches of which this process has compared plans last, some hundred of them. Any thread may call.
class known_batches {
public:
    static void note(thd const& batch) {
        known_batches& all = here();
        std::scoped_lock const lock(all.guard_);
        for (auto const& known : all.batches_)
            if (known && known->hash() == batch.hash()) return;
        all.batches_[all.next_++ % all.batches_.size()] = batch;
    }
    static std::optional<thd> find(std::uint64_t hash) {
        known_batches& all = here();
        std::scoped_lock const lock(all.guard_);
        for (auto const& known : all.batches_)
            if (known && known->hash() == hash) return known;
        return {};
    }

private:
    static known_batches& here() {
        static known_batches all;
        return all;
    }
    std::mutex guard_;
    std::array<std::optional<thd>, 128> batches_;
    std::size_t next_ = 0;
};

/// The first field in which two identities differ; where that is the hash of batches which this process knows, the
/// first offset, or else valid length.
class difference {
public:
    difference(identity const& mine, identity const& theirs)
        : field_(mine.first_difference(theirs)), batch_(mine.numbers[identity::cu_seqlens]) {
        if (field_ < 0) return;
        name_ = mine.name(field_);
        if (!of_hash()) return;
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
    std::string const& name() const { return name_; }
    /// Returns what a plan has there.
    std::string value(identity const& of) const {
        if (of_hash() && !number_) return of.numbers[identity::cu_seqlens] == batch_ ? "one batch" : "another";
        if (!number_) return of.value(field_);
        auto const batch = batch_of(of);
        return batch ? value(*batch, *number_, valid_) : "another";
    }

private:
    bool of_hash() const { return field_ == identity::texts + static_cast<int>(identity::cu_seqlens); }
    static std::optional<thd> batch_of(identity const& id) {
        return known_batches::find(id.numbers[identity::cu_seqlens]);
    }
    static std::string value(thd const& batch, index_t i, bool valid) {
        if (i >= batch.sequences() + !valid) return "none";
        return std::to_string(valid ? batch.valid(i) : batch.offset(i));
    }

    int field_;
    std::uint64_t batch_; ///< its hash
    std::string name_ = {};
    std::optional<index_t> number_ = {}; ///< of the offset, or valid length
    bool valid_ = false;
};

} // namespace cpx::detail
