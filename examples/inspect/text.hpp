// SPDX-License-Identifier: Apache-2.0
// A report in characters: one line a rank, one character a row where the batch is short enough.
#pragma once

#include "report.hpp"

#include <algorithm>
#include <array>
#include <sstream>
#include <string_view>

namespace inspect {

/// Draws lanes of characters. In colour, a rank's rows stand on its colour; without, its character must do.
class text_picture {
public:
    text_picture(report const& r, bool colour)
        : report_(r), colour_(colour), columns_(std::min<index_t>(r.batch.tokens(), 100)) {}

    std::string draw() {
        out_ << title(report_, "->") << '\n' << summary(report_) << '\n';
        if (report_.media) out_ << media_summary(report_) << '\n';
        out_ << '\n';
        ruler();
        if (report_.media) media();
        if (!report_.plan) {
            lanes(report_.before);
        } else {
            out_ << "\nbefore: " << report_.from << '\n';
            lanes(report_.before);
            out_ << "\nafter: " << report_.to << "  (0, 1, ...: comes from that rank; =: stays"
                 << (report_.from == "head_sharded" ? "; *: heads of several ranks, joined)\n" : ")\n");
            lanes(report_.plan->after);
            matrix();
        }
        if (columns_ < report_.batch.tokens())
            out_ << "\none character stands for " << count((report_.batch.tokens() + columns_ - 1) / columns_, "row")
                 << " or a little less; the first row of each is shown\n";
        if (report_.media) positions();
        return out_.str();
    }

private:
    static constexpr index_t most_matrix_ranks = 16, most_offsets = 10, most_media = 20;

    /// Returns the first row that column `c` stands for.
    index_t row_at(index_t c) const {
        return static_cast<index_t>(static_cast<long double>(c) * report_.batch.tokens() / columns_);
    }

    static char symbol(int rank) {
        if (rank == several) return '*';
        static constexpr std::string_view symbols = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
        return rank < static_cast<int>(symbols.size()) ? symbols[static_cast<std::size_t>(rank)] : '#';
    }

    std::string paint(char c, int rank) const {
        static constexpr std::array codes{25, 214, 36, 175, 74, 166, 227, 246}; // near to the colours of the SVG
        if (!colour_ || rank == several) return {c};
        bool const dark = rank % 8 == 0 || rank % 8 == 5;
        return "\033[48;5;" + std::to_string(codes[static_cast<std::size_t>(rank % 8)]) + (dark ? ";97m" : ";30m") + c +
               "\033[0m";
    }

    void label(std::string const& name) {
        out_ << name << std::string(10 - std::min<std::size_t>(name.size(), 9), ' ');
    }

    void ruler() {
        label("sequence");
        for (index_t c = 0, last = -1; c < columns_; ++c) {
            index_t const s = report_.batch.sequence(row_at(c));
            out_ << (s == last ? '-' : '|');
            last = s;
        }
        out_ << '\n';
    }

    void media() {
        label("media");
        auto next = report_.media->media.begin();
        for (index_t c = 0; c < columns_; ++c) {
            index_t const row = row_at(c);
            while (next != report_.media->media.end() && next->rows.last < row) ++next;
            bool const near = next != report_.media->media.end() && next->rows.first <= row + 1;
            out_ << (!near                             ? '.'
                     : row < next->rows.first          ? '<'
                     : row == next->rows.last          ? '>'
                     : next->kind == media_kind::image ? 'i'
                                                       : 'v');
        }
        out_ << "  .: text, <i>: an image from start to end, <v>: a frame of a video\n";
    }

    void positions() {
        out_ << "\npositions of media\n";
        auto const& axes = report_.media->positions.axes;
        index_t shown = 0;
        for (medium const& m : report_.media->media) {
            if (++shown > most_media) {
                out_ << "and " << count(std::ssize(report_.media->media) - most_media, "other") << ": see --json\n";
                break;
            }
            out_ << name_of(m) << " of sequence " << report_.batch.sequence(m.rows.first) << ": rows " << m.rows.first
                 << '-' << m.rows.last - 1;
            char const* const names[] = {"time", "height", "width"};
            for (index_t axis = 0; axis < 3; ++axis) { // of the first and the last row, which span them
                auto const at = [&](index_t row) {
                    return axes[static_cast<std::size_t>(axis * report_.batch.tokens() + row)];
                };
                out_ << ", " << names[axis] << ' ' << at(m.rows.first);
                if (at(m.rows.last - 1) > at(m.rows.first)) out_ << '-' << at(m.rows.last - 1);
            }
            out_ << '\n';
        }
    }

    void lanes(std::vector<lane> const& lanes) {
        for (int rank = 0; rank < report_.ranks; ++rank) {
            lane const& held = lanes[static_cast<std::size_t>(rank)];
            label("rank " + std::to_string(rank));
            auto next = held.blocks.begin();
            for (index_t c = 0; c < columns_; ++c) {
                while (next != held.blocks.end() && next->rows.last <= row_at(c)) ++next;
                bool const here = next != held.blocks.end() && next->rows.first <= row_at(c);
                bool const joined = here && next->heads.size() < held.heads.size();
                int const source = joined ? several : here ? next->source : 0;
                bool const stays = here && &lanes != &report_.before && source == rank;
                out_ << (here ? paint(stays ? '=' : symbol(source), source) : ".");
            }
            out_ << "  " << note(report_, held, &lanes != &report_.before) << ", cu_seqlens";
            for (std::size_t i = 0; i < held.cu_seqlens.size() && i < most_offsets; ++i)
                out_ << ' ' << held.cu_seqlens[i];
            out_ << (held.cu_seqlens.size() > most_offsets ? " ...\n" : "\n");
        }
    }

    void matrix() {
        out_ << "\nrows from rank (down) to rank (across); on the diagonal, rows that stay\n";
        if (report_.ranks > most_matrix_ranks) {
            out_ << "too many ranks to show here: see --json\n";
            return;
        }
        std::size_t width = 4;
        for (auto const& row : report_.plan->rows)
            for (index_t const rows : row) width = std::max(width, std::to_string(rows).size() + 2);
        auto const cell = [&](std::string const& text) { out_ << std::string(width - text.size(), ' ') << text; };
        cell("");
        for (int j = 0; j < report_.ranks; ++j) cell(std::to_string(j));
        for (int i = 0; i < report_.ranks; ++i) {
            out_ << '\n';
            cell(std::to_string(i));
            for (index_t const rows : report_.plan->rows[static_cast<std::size_t>(i)]) cell(std::to_string(rows));
        }
        out_ << '\n';
    }

    report const& report_;
    bool colour_;
    index_t columns_;
    std::ostringstream out_;
};

} // namespace inspect
