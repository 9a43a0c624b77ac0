// SPDX-License-Identifier: Apache-2.0
// A report as an SVG picture: who holds what, and what moves. In every lane, tokens go across and heads down.
#pragma once

#include "canvas.hpp"
#include "report.hpp"

#include <utility>
#include <vector>

namespace inspect {

/// Returns the colour of a rank, which colour-blind readers can tell apart, too; from rank 8 on with a pattern, so that
/// 64 differ. Pale: what stays on its rank.
///
/// Source of the colours: Okabe, Ito, "Color Universal Design", 2008, with grey for black.
inline paint paint_of(int rank, bool pale = false) {
    static constexpr std::array<colour, 8> palette{{{0, 114, 178},
                                                    {230, 159, 0},
                                                    {0, 158, 115},
                                                    {204, 121, 167},
                                                    {86, 180, 233},
                                                    {213, 94, 0},
                                                    {240, 228, 66},
                                                    {153, 153, 153}}};
    colour const solid = rank == several ? colour{85, 85, 85} : palette[static_cast<std::size_t>(rank % 8)];
    if (pale) return {solid.lighter(0.8), solid, rank / 8 % 8};
    return {solid, solid.dark() ? white : black, rank == several ? 0 : rank / 8 % 8};
}

/// Where the rows of a batch lie across the picture: every sequence has a least width, and a gap behind it.
class across {
public:
    across(cpx::thd const& batch, double left, double widest_row, double most) {
        double const tokens = static_cast<double>(batch.tokens()), most_gap = 3, least_sequence = 18;
        index_t sequences = 0;
        for (index_t s = 0; s < batch.sequences(); ++s) sequences += batch.length(s) > 0;
        double const count = static_cast<double>(std::max<index_t>(sequences, 1));
        most = std::max(most, std::min(1600.0, 36 * count)); // many sequences have more room
        gap_ = sequences > 1 ? std::min(most_gap, most / 10 / count) : 0;
        double const unit = tokens > 0 ? std::min(widest_row, (most - gap_ * (count - 1)) / tokens) : 0;
        double const least = std::min(least_sequence, most / 2 / count);
        for (index_t s = 0; s < batch.sequences(); ++s) {
            double const rows = static_cast<double>(batch.length(s)), width = std::max(rows * unit, least);
            begins_.push_back(left);
            row_widths_.push_back(rows > 0 ? width / rows : 0);
            left += rows > 0 ? width + gap_ : 0;
        }
        end_ = left - gap_;
        batch_ = &batch;
    }
    double row_width(index_t sequence) const { return row_widths_[static_cast<std::size_t>(sequence)]; }
    double gap() const { return gap_; }
    double end() const { return end_; }
    /// Returns where a row begins that is not behind the last.
    double operator()(index_t row) const {
        index_t const s = batch_->sequence(row);
        return begins_[static_cast<std::size_t>(s)] + static_cast<double>(row - batch_->offset(s)) * row_width(s);
    }
    /// Returns how wide rows of one sequence are.
    double width(range rows) const {
        return static_cast<double>(rows.size()) * row_width(batch_->sequence(rows.first));
    }

private:
    cpx::thd const* batch_;
    std::vector<double> begins_, row_widths_; ///< of sequences
    double gap_ = 0, end_ = 0;
};

/// Draws from top to bottom: title, batch, media and their positions, lanes before, lanes after, matrix.
class svg_picture {
public:
    explicit svg_picture(report const& r)
        : report_(r), left_(r.by_heads ? 112 : 92), x_(r.batch, left_, widest_row, r.media ? 1200 : 880),
          lane_height_(std::clamp(900.0 / r.ranks, 3.0, 24.0)) {
        if (r.by_heads && r.ranks <= most_matrix_ranks * 2)
            lane_height_ = std::clamp(7.0 * static_cast<double>(std::min<index_t>(r.ranks, r.heads)), 32.0, 48.0);
    }

    std::string draw() {
        canvas_.text(margin, 30, "start", 18, black, title(report_, "→"), " font-weight='600'");
        canvas_.text(margin, 54, "start", 13, grey, summary(report_));
        y_ = 74;
        if (report_.media) canvas_.text(margin, y_, "start", 13, grey, media_summary(report_));
        y_ += report_.media ? 44 : 24;
        batch();
        if (report_.media) media();
        lanes(report_.before, report_.plan ? "before: " + report_.from : "");
        if (report_.plan) {
            lanes(report_.plan->after, "after: " + report_.to);
            matrix();
        }
        return canvas_.finish(margin, 640);
    }

private:
    static constexpr double margin = 24, widest_row = 44;
    static constexpr int most_matrix_ranks = 16;
    static constexpr colour image_colour{58, 64, 90}, video_colour{126, 104, 150};

    /// Calls `f(rows)` with those of `rows` that lie in one sequence, of each.
    template <class F>
    void for_each_sequence(range rows, F&& f) const {
        while (!rows.empty()) {
            index_t const end = report_.batch.offset(report_.batch.sequence(rows.first) + 1);
            f(cpx::intersect(rows, range{rows.first, end}));
            rows.first = std::min(rows.last, end);
        }
    }

    void heading(std::string const& words, double& x) {
        canvas_.text(left_, y_ + 4, "start", 13, black, words, " font-weight='600'");
        x = left_ + canvas::width_of(words, 15) + 20;
    }

    void key(double& x, paint const& fill, colour rim, std::string const& words) {
        canvas_.box(x, y_ - 1, 10, 10, fill, rim);
        canvas_.text(x + 16, y_ + 4, "start", 11, grey, words);
        x += 36 + canvas::width_of(words, 11);
    }

    void batch() {
        canvas_.text(left_ - 14, y_ + 11, "end", 12, black, "batch");
        double free = 0; // where the next offset can stand without touching the one before
        auto const offset = [&](index_t row, double x) {
            std::string const number = std::to_string(row);
            double const half = canvas::width_of(number, 10) / 2;
            if (x - half < free) return;
            canvas_.text(x, y_ - 9, "middle", 10, grey, number);
            free = x + half + 7;
        };
        for_each_sequence({0, report_.batch.tokens()}, [&](range rows) {
            index_t const s = report_.batch.sequence(rows.first);
            double const x = x_(rows.first), width = x_.width(rows);
            canvas_.box(x, y_, width, 22, s % 2 ? silver.lighter(0.3) : silver, white);
            canvas_.label(x, y_ + 11, width, 11, black, {"sequence " + std::to_string(s), std::to_string(s)});
            offset(rows.first, x);
        });
        offset(report_.batch.tokens(), x_.end());
        y_ += 38;
    }

    static colour colour_of(media_kind kind) {
        return kind == media_kind::text ? silver : kind == media_kind::image ? image_colour : video_colour;
    }

    /// Draws which tokens are of images and videos, then a strip an axis: a bar a token, as high as its position.
    void media() {
        y_ -= 8;
        canvas_.text(left_ - 14, y_ + 9, "end", 12, black, "media");
        for_each_sequence({0, report_.batch.tokens()}, [&](range rows) {
            canvas_.box(x_(rows.first), y_ + 7, x_.width(rows), 4, silver.lighter(0.4), silver.lighter(0.4));
        });
        for (medium const& m : report_.media->media) {
            double const x = x_(m.rows.first), width = x_.width(m.rows),
                         row = width / static_cast<double>(m.rows.size());
            colour const fill = colour_of(m.kind);
            for (double const side : {x - row, x + width}) // start and end
                canvas_.box(side + 0.15 * row, y_ + 3, 0.7 * row, 12, fill.lighter(0.55), fill.lighter(0.55));
            canvas_.box(x, y_, width, 18, fill, fill);
            std::string const number = std::to_string(m.number), frame = std::to_string(m.frame);
            std::string const size = ' ' + std::to_string(m.height) + "×" + std::to_string(m.width);
            canvas_.label(x, y_ + 9, width, 10, white,
                          {name_of(m) + ':' + size, m.kind == media_kind::image ? "image " + number : "frame " + frame,
                           m.kind == media_kind::image ? number : number + '.' + frame});
        }
        y_ += 40;
        double x = 0;
        heading("positions", x);
        key(x, silver, silver, "text");
        key(x, image_colour, image_colour, "image");
        key(x, video_colour, video_colour, "frame of a video");
        y_ += 20;
        index_t most = 1;
        for (index_t const at : report_.media->positions.axes) most = std::max(most, at);
        char const* const names[] = {"time", "height", "width"};
        for (index_t axis = 0; axis < 3; ++axis) positions(names[axis], axis * report_.batch.tokens(), most);
        y_ += 18;
    }

    /// Draws a strip of positions. Where rows are narrower than a pixel, the largest of some stands for them.
    void positions(char const* name, index_t first, index_t most) {
        static constexpr double height = 34, above = 12;
        canvas_.text(left_ - 14, y_ + above + height / 2, "end", 12, black, name);
        double const base = y_ + above + height;
        auto const at = [&](index_t row) {
            return report_.media->positions.axes[static_cast<std::size_t>(first + row)];
        };
        auto next = report_.media->media.begin();
        for_each_sequence({0, report_.batch.tokens()}, [&](range sequence) {
            double const width = x_.row_width(report_.batch.sequence(sequence.first));
            index_t const step = std::max<index_t>(1, static_cast<index_t>(1 / width));
            for (index_t row = sequence.first; row < sequence.last; row += step) {
                while (next != report_.media->media.end() && next->rows.last <= row) ++next;
                bool const placeholder = next != report_.media->media.end() && next->rows.first <= row;
                index_t const last = std::min(row + step, sequence.last);
                index_t position = 0;
                for (index_t r = row; r < last; ++r) position = std::max(position, at(r));
                double const bar = 1 + (height - 1) * static_cast<double>(position) / static_cast<double>(most);
                double const all = width * static_cast<double>(last - row), space = width > 4 ? 1 : 0;
                colour const fill = colour_of(placeholder ? next->kind : media_kind::text);
                canvas_.box(x_(row) + space, base - bar, all - 2 * space, bar, fill, fill, 0);
                if (step == 1) canvas_.label(x_(row), base - bar - 6, width, 9, black, {std::to_string(position)});
            }
            canvas_.line({x_(sequence.first), base + 0.5, x_(sequence.first) + x_.width(sequence), base + 0.5}, silver);
        });
        y_ = base + 8;
    }

    void lanes(std::vector<lane> const& lanes, std::string const& words) {
        bool const after = &lanes != &report_.before;
        double x = left_;
        if (!words.empty()) heading(words, x);
        if (after) {
            colour const sender = paint_of(0).ground;
            key(x, sender, sender, "received, in the colour of the sender");
            key(x, paint_of(0, true), sender, "stays");
        }
        if (report_.by_heads && room()) {
            std::string const axis = "↓ in every lane: " + count(report_.heads, "head") + " of a row";
            canvas_.text(x, y_ + 4, "start", 11, grey, axis);
            x += 20 + canvas::width_of(axis, 11);
        }
        double const y_of_heading = y_;
        y_ += words.empty() && !report_.by_heads ? 0 : 20;
        bool joins = after && report_.by_heads && report_.everywhere && report_.ranks > static_cast<int>(most_bands);
        if (!room()) ground(lane_height_ * report_.ranks);
        for (int rank = 0; rank < report_.ranks; ++rank) {
            lane const& held = lanes[static_cast<std::size_t>(rank)];
            double const middle = y_ + lane_height_ / 2;
            if (room()) ground(lane_height_);
            joins |= blocks(held, after, rank);
            if (room()) {
                paint const own = paint_of(rank);
                canvas_.box(margin, middle - 5, 10, 10, own, own.ground);
                canvas_.text(margin + 18, middle, "start", 12, black, "rank " + std::to_string(rank));
                canvas_.text(x_.end() + 12, middle, "start", 11, grey, note(report_, held, after));
                if (report_.by_heads) heads();
            }
            y_ += lane_height_ + (room() ? 4 : 0);
        }
        double const next = std::exchange(y_, y_of_heading) + 20;
        if (joins) key(x, paint_of(several), paint_of(several).ground, "of several ranks, joined");
        y_ = next;
    }

    /// Draws what a lane holds. What is too narrow to be told from its neighbours is joined with them. Returns whether
    /// that was of several ranks.
    bool blocks(lane const& held, bool after, int rank) {
        bool joins = false;
        block thin{};
        auto const flush = [&] {
            if (!thin.rows.empty()) draw(thin, after && thin.source == rank);
            thin.rows = {};
        };
        for (block const& b : held.blocks)
            for_each_sequence(b.rows, [&](range rows) {
                block const one{rows, b.heads, b.source};
                bool const narrow = x_.width(rows) < 1.5, same_heads = one.heads == thin.heads;
                if (narrow && same_heads && thin.rows.last == rows.first &&
                    report_.batch.sequence(thin.rows.first) == report_.batch.sequence(rows.first)) {
                    if (thin.source != one.source) thin.source = several, joins = true;
                    thin.rows.last = rows.last;
                    return;
                }
                flush();
                narrow ? void(thin = one) : draw(one, after && one.source == rank);
            });
        flush();
        return joins;
    }

    void ground(double height) {
        if (x_.gap() < 1) return canvas_.box(left_, y_, x_.end() - left_, height, paper, paper);
        for_each_sequence({0, report_.batch.tokens()},
                          [&](range rows) { canvas_.box(x_(rows.first), y_, x_.width(rows), height, paper, paper); });
    }

    /// Returns whether lanes have room for heads, names and notes.
    bool room() const { return lane_height_ >= 10; }

    /// Draws the axis of a lane.
    void heads() {
        double const x = left_ - 5, last = y_ + lane_height_;
        canvas_.line({x + 3, y_ + 0.5, x, y_ + 0.5, x, last - 0.5, x + 3, last - 0.5}, silver);
        canvas_.text(x - 3, y_ + 4, "end", 8, grey, "0");
        if (report_.heads > 1) canvas_.text(x - 3, last - 4, "end", 8, grey, std::to_string(report_.heads - 1));
    }

    /// Draws rows of one sequence: in the colour of the rank they come from, pale with a rim if they stay.
    void draw(block const& b, bool stays) {
        paint const fill = paint_of(b.source, stays);
        colour const rim = stays ? fill.ink : fill.ground, ink = fill.ground.dark() ? white : black;
        double const head = lane_height_ / static_cast<double>(report_.heads);
        double const top = room() ? y_ + head * static_cast<double>(b.heads.first) : y_;
        double const height = room() ? head * static_cast<double>(b.heads.size()) : lane_height_,
                     middle = top + height / 2;
        double const x = x_(b.rows.first), width = x_.width(b.rows), row = width / static_cast<double>(b.rows.size());
        double const inset = height < 6 ? 0 : 0.5;
        paint const thin(fill.ink.lighter(0.5), fill.ink, fill.pattern); // for what stays, where a rim has no room
        auto const rows = [&](double from, double to, double space) {
            double const wide = std::max(to - from - 2 * space, 0.5), down = height - 2 * inset;
            canvas_.box(from + space, top + inset, wide, down, stays && std::min(wide, down) < 3 ? thin : fill, rim);
        };
        bool const words = height >= 14;
        if (row >= 15) { // every row is a box of its own
            for (index_t i = 0; i < b.rows.size(); ++i) {
                double const at = x + static_cast<double>(i) * row;
                rows(at, at + row, 1);
                if (words) canvas_.label(at - 2, middle, row + 4, 10, ink, {std::to_string(b.rows.first + i)}, fill);
            }
        } else {
            rows(x, x + width, width < 4 ? 0 : 0.5);
            std::string const first = std::to_string(b.rows.first), last = std::to_string(b.rows.last - 1);
            if (words && width > canvas::width_of(first + last, 9) + 12) {
                canvas_.text(x + 4, middle, "start", 9, ink, first, "", fill);
                canvas_.text(x + width - 4, middle, "end", 9, ink, last, "", fill);
            } else if (words)
                canvas_.label(x, middle, width, 8, ink, {first}, fill);
        }
        if (report_.media && words) mark(b.rows, top + height, height < 20 ? 2 : 3); // below the words
    }

    /// Draws a line under the rows that hold placeholders.
    void mark(range rows, double bottom, double thick) {
        auto const& media = report_.media->media;
        for (auto m =
                 std::ranges::upper_bound(media, rows.first, {}, [](medium const& each) { return each.rows.last; });
             m != media.end() && m->rows.first < rows.last; ++m) {
            range const common = cpx::intersect(m->rows, rows);
            if (x_.width(common) < 6) continue;
            canvas_.box(x_(common.first) + 1, bottom - thick, x_.width(common) - 2, thick, colour_of(m->kind), white,
                        0);
        }
    }

    void matrix() {
        if (report_.ranks > most_matrix_ranks) return;
        index_t largest = 0;
        for (auto const& row : report_.plan->rows)
            for (index_t const rows : row) largest = std::max(largest, rows);
        double const width = std::max(26.0, canvas::width_of(std::to_string(largest), 11) + 10), height = 22;
        canvas_.text(left_, y_ + 4, "start", 13, black, "rows from rank (down) to rank (across)", " font-weight='600'");
        y_ += 26;
        for (int j = 0; j < report_.ranks; ++j)
            canvas_.text(left_ + (j + 0.5) * width, y_, "middle", 11, grey, std::to_string(j));
        y_ += 10;
        for (int i = 0; i < report_.ranks; ++i, y_ += height) {
            canvas_.text(left_ - 14, y_ + height / 2, "end", 11, grey, std::to_string(i));
            for (int j = 0; j < report_.ranks; ++j) {
                index_t const rows = report_.plan->rows[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
                paint const fill = rows > 0 ? paint_of(i, i == j) : paint(paper);
                canvas_.box(left_ + j * width + 1, y_ + 1, width - 2, height - 2, fill,
                            i == j ? fill.ink : fill.ground);
                canvas_.text(left_ + (j + 0.5) * width, y_ + height / 2, "middle", 11,
                             rows == 0            ? silver
                             : fill.ground.dark() ? white
                                                  : black,
                             std::to_string(rows), "", fill);
            }
        }
    }

    report const& report_;
    canvas canvas_;
    double left_;
    across x_;
    double lane_height_, y_ = 0;
};

} // namespace inspect
