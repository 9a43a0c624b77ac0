// SPDX-License-Identifier: Apache-2.0
// A report as an SVG picture: who holds what, and what moves.
#pragma once

#include "report.hpp"

#include <array>
#include <cmath>
#include <ostream>
#include <sstream>

namespace inspect {

struct colour {
    int red, green, blue;
    /// Mixes with white; 1 is white.
    colour lighter(double share) const {
        auto const mix = [share](int c) { return static_cast<int>(c + (255 - c) * share); };
        return {mix(red), mix(green), mix(blue)};
    }
    bool dark() const { return 0.3 * red + 0.59 * green + 0.11 * blue < 140; }
    friend std::ostream& operator<<(std::ostream& out, colour c) {
        return out << "rgb(" << c.red << ',' << c.green << ',' << c.blue << ')';
    }
};

inline constexpr colour white{255, 255, 255}, black{34, 34, 34}, grey{110, 110, 110}, silver{200, 200, 200},
    paper{244, 244, 244};

/// Returns the colour of a rank, which colour-blind readers can tell apart, too; every 8 ranks a lighter set.
///
/// Source: Okabe, Ito, "Color Universal Design", 2008, with grey for black.
inline colour colour_of(int rank) {
    static constexpr std::array<colour, 8> palette{{{0, 114, 178},
                                                    {230, 159, 0},
                                                    {0, 158, 115},
                                                    {204, 121, 167},
                                                    {86, 180, 233},
                                                    {213, 94, 0},
                                                    {240, 228, 66},
                                                    {153, 153, 153}}};
    if (rank == several) return {85, 85, 85};
    return palette[static_cast<std::size_t>(rank % 8)].lighter(rank / 8 % 2 ? 0.45 : 0.0);
}

/// The elements of an SVG file.
class canvas {
public:
    void box(double x, double y, double width, double height, colour fill, colour line) {
        out_ << "<rect x='" << round(x) << "' y='" << round(y) << "' width='" << round(width) << "' height='"
             << round(height) << "' fill='" << fill << "' stroke='" << line << "' rx='2'/>\n";
    }
    void line(double x, double top, double bottom, colour stroke) {
        out_ << "<path d='M" << round(x) << ' ' << round(top) << 'V' << round(bottom) << "' stroke='" << stroke
             << "'/>\n";
    }
    /// `anchor` is start, middle or end; `y` is the middle of the letters.
    void text(double x, double y, char const* anchor, int size, colour fill, std::string const& words,
              char const* style = "") {
        out_ << "<text x='" << round(x) << "' y='" << round(y + 0.36 * size) << "' text-anchor='" << anchor
             << "' font-size='" << size << "' fill='" << fill << "'" << style << '>' << words << "</text>\n";
    }
    std::string finish(double width, double height) const {
        std::ostringstream file;
        file << "<svg xmlns='http://www.w3.org/2000/svg' width='" << round(width) << "' height='" << round(height)
             << "' viewBox='0 0 " << round(width) << ' ' << round(height)
             << "' font-family='system-ui, -apple-system, \"Segoe UI\", \"DejaVu Sans\", Helvetica, Arial, "
                "sans-serif'>\n"
             << "<rect width='100%' height='100%' fill='white'/>\n"
             << out_.str() << "</svg>\n";
        return file.str();
    }

private:
    static double round(double x) { return std::round(x * 100) / 100; }
    std::ostringstream out_;
};

/// Draws from top to bottom: title, batch, lanes before, lanes after, matrix.
class svg_picture {
public:
    explicit svg_picture(report const& r) : report_(r) {
        double const tokens = static_cast<double>(r.batch.tokens());
        row_width_ = tokens > 0 ? std::min(widest_row, most_width / tokens) : 0;
        lane_height_ = std::clamp(900.0 / r.ranks, 3.0, 24.0);
    }

    std::string draw() {
        canvas_.text(margin, 30, "start", 18, black, title(report_, "→"), " font-weight='600'");
        canvas_.text(margin, 54, "start", 13, grey, summary(report_));
        y_ = 98;
        batch();
        lanes(report_.before, report_.plan ? "before: " + report_.from : "");
        if (report_.plan) {
            lanes(report_.plan->after, "after: " + report_.to);
            matrix();
        }
        double const widest_text = std::max(width_of(title(report_, ">"), 20), width_of(summary(report_), 14));
        return canvas_.finish(std::max({x_of(report_.batch.tokens()) + right, widest_text + 2 * margin, 640.0}),
                              y_ + margin);
    }

private:
    static constexpr double margin = 24, left = 92, right = 150, most_width = 880, widest_row = 44;
    static constexpr int most_matrix_ranks = 16;

    double x_of(index_t row) const { return left + static_cast<double>(row) * row_width_; }
    static double width_of(std::string const& text, int size) { return 0.6 * size * static_cast<double>(text.size()); }

    void batch() {
        canvas_.text(left - 14, y_ + 11, "end", 12, black, "batch");
        double free = 0; // where the next offset can stand without touching the one before
        for (index_t s = 0; s < report_.batch.sequences(); ++s) {
            double const x = x_of(report_.batch.offset(s)), width = x_of(report_.batch.offset(s + 1)) - x;
            if (width <= 0) continue;
            canvas_.box(x, y_, width, 22, s % 2 ? silver.lighter(0.3) : silver, white);
            std::string const name = "sequence " + std::to_string(s), number = std::to_string(s);
            if (width > width_of(name, 11))
                canvas_.text(x + width / 2, y_ + 11, "middle", 11, black, name);
            else if (width > width_of(number, 11) + 4)
                canvas_.text(x + width / 2, y_ + 11, "middle", 11, black, number);
            free = offset(report_.batch.offset(s), free);
        }
        offset(report_.batch.tokens(), free);
        y_ += 38;
    }

    double offset(index_t row, double free) {
        std::string const number = std::to_string(row);
        double const half = width_of(number, 10) / 2;
        if (x_of(row) - half < free) return free;
        canvas_.text(x_of(row), y_ - 9, "middle", 10, grey, number);
        return x_of(row) + half + 4;
    }

    void lanes(std::vector<lane> const& lanes, std::string const& heading) {
        bool const after = &lanes != &report_.before;
        if (!heading.empty()) canvas_.text(left, y_ + 4, "start", 13, black, heading, " font-weight='600'");
        if (after) legend(left + 40 + width_of(heading, 13));
        y_ += heading.empty() ? 0 : 20;
        double const top = y_;
        for (int rank = 0; rank < report_.ranks; ++rank) {
            lane const& held = lanes[static_cast<std::size_t>(rank)];
            double const middle = y_ + lane_height_ / 2;
            canvas_.box(left, y_, x_of(report_.batch.tokens()) - left, lane_height_, paper, paper);
            index_t received = 0;
            for (run const& r : held.runs) {
                received += r.source != rank ? r.rows.size() : 0;
                for (range rows = r.rows; !rows.empty();) {
                    range const rest{rows.first, report_.batch.offset(report_.batch.sequence(rows.first) + 1)};
                    draw(cpx::intersect(rows, rest), r.source, after && r.source == rank);
                    rows.first = std::min(rows.last, rest.last);
                }
            }
            if (lane_height_ >= 10) {
                canvas_.box(margin, middle - 5, 10, 10, colour_of(rank), colour_of(rank));
                canvas_.text(margin + 18, middle, "start", 12, black, "rank " + std::to_string(rank));
                canvas_.text(x_of(report_.batch.tokens()) + 12, middle, "start", 11, grey,
                             count(held.rows(), "row") + (after ? ", " + std::to_string(received) + " received" : ""));
            }
            y_ += lane_height_ + (lane_height_ >= 10 ? 4 : 0);
        }
        separators(top - 2, y_ - 2);
        y_ += 20;
    }

    /// Draws rows of one sequence that one rank holds: solid in the colour of the rank they come from, or outlined if
    /// they stay.
    void draw(range rows, int source, bool stays) {
        colour const solid = colour_of(source), fill = stays ? solid.lighter(0.8) : solid;
        colour const ink = fill.dark() ? white : black;
        double const x = x_of(rows.first), width = x_of(rows.last) - x, middle = y_ + lane_height_ / 2;
        bool const room = lane_height_ >= 14;
        if (room && row_width_ >= 15) { // every row is a box of its own
            for (index_t row = rows.first; row < rows.last; ++row) {
                canvas_.box(x_of(row) + 1, y_ + 0.5, row_width_ - 2, lane_height_ - 1, fill, solid);
                canvas_.text(x_of(row) + row_width_ / 2, middle, "middle", 10, ink, std::to_string(row));
            }
            return;
        }
        canvas_.box(x + 0.5, y_ + 0.5, std::max(width - 1, 0.5), lane_height_ - 1, fill, solid);
        std::string const first = std::to_string(rows.first), last = std::to_string(rows.last - 1);
        if (room && width > width_of(first + last, 9) + 12) {
            canvas_.text(x + 4, middle, "start", 9, ink, first);
            canvas_.text(x + width - 4, middle, "end", 9, ink, last);
        } else if (room && width > width_of(first, 8) + 1) {
            canvas_.text(x + width / 2, middle, "middle", 8, ink, first);
        }
    }

    /// Draws a line through the lanes where a sequence begins.
    void separators(double top, double bottom) {
        if (report_.batch.sequences() > 64) return;
        for (index_t s = 1; s < report_.batch.sequences(); ++s)
            canvas_.line(x_of(report_.batch.offset(s)), top, bottom, grey);
    }

    void legend(double x) {
        bool const joins = report_.from == "head_sharded" && report_.to != "head_sharded";
        colour const moved = colour_of(joins ? several : 0);
        canvas_.box(x, y_ - 1, 10, 10, moved, moved);
        canvas_.text(x + 16, y_ + 4, "start", 11, grey,
                     joins ? "heads of several ranks, joined" : "received, in the colour of the sender");
        if (joins) return;
        canvas_.box(x + 250, y_ - 1, 10, 10, moved.lighter(0.8), moved);
        canvas_.text(x + 266, y_ + 4, "start", 11, grey, "stays");
    }

    void matrix() {
        if (report_.ranks > most_matrix_ranks) return;
        index_t largest = 0;
        for (auto const& row : report_.plan->rows)
            for (index_t const rows : row) largest = std::max(largest, rows);
        double const width = std::max(26.0, width_of(std::to_string(largest), 11) + 10), height = 22;
        canvas_.text(left, y_ + 4, "start", 13, black, "rows from rank (down) to rank (across)", " font-weight='600'");
        y_ += 26;
        for (int j = 0; j < report_.ranks; ++j)
            canvas_.text(left + (j + 0.5) * width, y_, "middle", 11, grey, std::to_string(j));
        y_ += 10;
        for (int i = 0; i < report_.ranks; ++i, y_ += height) {
            canvas_.text(left - 14, y_ + height / 2, "end", 11, grey, std::to_string(i));
            for (int j = 0; j < report_.ranks; ++j) {
                index_t const rows = report_.plan->rows[static_cast<std::size_t>(i)][static_cast<std::size_t>(j)];
                colour const solid = rows > 0 ? colour_of(i) : paper;
                colour const fill = rows > 0 && i == j ? solid.lighter(0.8) : solid;
                canvas_.box(left + j * width + 1, y_ + 1, width - 2, height - 2, fill, solid);
                canvas_.text(left + (j + 0.5) * width, y_ + height / 2, "middle", 11,
                             rows == 0     ? silver
                             : fill.dark() ? white
                                           : black,
                             std::to_string(rows));
            }
        }
    }

    report const& report_;
    canvas canvas_;
    double row_width_ = 0, lane_height_ = 0, y_ = 0;
};

} // namespace inspect
