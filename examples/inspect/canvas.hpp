// SPDX-License-Identifier: Apache-2.0
// Colours, patterns, boxes and words of an SVG file.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <ostream>
#include <sstream>
#include <string>
#include <string_view>

namespace inspect {

struct colour {
    int red, green, blue;
    /// Mixes with white; 1 is white.
    colour lighter(double share) const {
        auto const mix = [share](int c) { return static_cast<int>(c + (255 - c) * share); };
        return {mix(red), mix(green), mix(blue)};
    }
    bool dark() const { return 0.3 * red + 0.59 * green + 0.11 * blue < 140; }
    std::string text() const {
        return "rgb(" + std::to_string(red) + ',' + std::to_string(green) + ',' + std::to_string(blue) + ')';
    }
};

inline constexpr colour white{255, 255, 255}, black{34, 34, 34}, grey{110, 110, 110}, silver{200, 200, 200},
    paper{244, 244, 244};

/// A colour with lines or dots on it; pattern 0 is none. Ranks that have the same colour differ in it.
struct paint {
    colour ground, ink;
    int pattern = 0;
    paint(colour solid) : ground(solid), ink(solid) {}
    paint(colour ground_, colour ink_, int pattern_) : ground(ground_), ink(ink_), pattern(pattern_) {}
};

/// What is drawn so far, and how far it reaches.
class canvas {
public:
    /// No line where a side is so small that the line would cover what is inside.
    void box(double x, double y, double width, double height, paint const& fill, colour line, double corner = 2) {
        out_ << "<rect x='" << round(x) << "' y='" << round(y) << "' width='" << round(width) << "' height='"
             << round(height) << "' fill='" << reference(fill) << '\'';
        if (std::min(width, height) >= 3) out_ << " stroke='" << line.text() << '\'';
        if (double const r = std::min({corner, width / 4, height / 4}); r >= 0.5) out_ << " rx='" << round(r) << '\'';
        out_ << "/>\n";
        reach(x + width, y + height);
    }
    /// Draws lines from one of the points x, y, x, y, ... to the next.
    void line(std::initializer_list<double> points, colour stroke) {
        out_ << "<path fill='none' stroke='" << stroke.text() << "' d='";
        char command = 'M';
        for (auto p = points.begin(); p != points.end(); p += 2, command = 'L')
            out_ << command << round(p[0]) << ' ' << round(p[1]);
        out_ << "'/>\n";
    }
    /// `anchor` is start, middle or end; `y` is the middle of the letters. On a pattern they stand on a plate.
    void text(double x, double y, char const* anchor, int size, colour fill, std::string const& words,
              char const* style = "", paint const& under = white) {
        double const width = width_of(words, size), first = x - width * (*anchor == 's' ? 0 : *anchor == 'm' ? 0.5 : 1);
        if (under.pattern > 0) box(first - 2, y - 0.6 * size, width + 4, 1.2 * size, under.ground, under.ground);
        out_ << "<text x='" << round(x) << "' y='" << round(y + 0.36 * size) << "' text-anchor='" << anchor
             << "' font-size='" << size << "' fill='" << fill.text() << '\'' << style << '>' << words << "</text>\n";
        reach(first + width, y + size);
    }
    /// Writes the first of some words that has room in a box, in its middle, or nothing.
    void label(double x, double y, double width, int size, colour fill, std::initializer_list<std::string> words,
               paint const& under = white) {
        for (std::string const& each : words)
            if (width_of(each, size) + 3 <= width) return text(x + width / 2, y, "middle", size, fill, each, "", under);
    }
    /// Returns about how wide words are, of DejaVu Sans, which is a wide one.
    static double width_of(std::string const& words, int size) {
        double width = 0;
        for (char const c : words) {
            bool const follows = (c & 0xC0) == 0x80; // in a letter of UTF-8 that has begun
            bool const narrow = std::string_view(" ,.:;-()ijlftr").find(c) != std::string_view::npos;
            width += follows ? 0 : narrow ? 0.37 : c == 'm' || c == 'w' ? 0.93 : 0.64;
        }
        return size * width;
    }

    std::string finish(double margin, double least_width) const {
        double const width = std::ceil(std::max(right_ + margin, least_width)), height = std::ceil(bottom_ + margin);
        std::ostringstream file;
        file << "<svg xmlns='http://www.w3.org/2000/svg' width='" << width << "' height='" << height
             << "' viewBox='0 0 " << width << ' ' << height
             << "' font-family='system-ui, -apple-system, \"Segoe UI\", \"DejaVu Sans\", Helvetica, Arial, "
                "sans-serif'>\n";
        if (!patterns_.empty()) {
            file << "<defs>\n";
            for (auto const& [definition, name] : patterns_)
                file << "<pattern id='" << name << "' width='6' height='6' patternUnits='userSpaceOnUse'>" << definition
                     << "</pattern>\n";
            file << "</defs>\n";
        }
        file << "<rect width='100%' height='100%' fill='white'/>\n" << out_.str() << "</svg>\n";
        return file.str();
    }

private:
    static double round(double x) { return std::round(x * 100) / 100; }
    void reach(double x, double y) { right_ = std::max(right_, x), bottom_ = std::max(bottom_, y); }

    /// Returns what stands in `fill`: a colour, or the name of a pattern that is defined at the head of the file.
    std::string reference(paint const& p) {
        static constexpr std::array<char const*, 7> lines{"M-1 1L1 -1M0 6L6 0M5 7L7 5", // down to the left
                                                          "M1.5 1.5h.01M4.5 4.5h.01",   // dots
                                                          "M-1 5L1 7M0 0L6 6M5 -1L7 1", // down to the right
                                                          "M0 3H6",
                                                          "M3 0V6",
                                                          "M0 0L6 6M6 0L0 6",
                                                          "M0 3H6M3 0V6"};
        if (p.pattern == 0) return p.ground.text();
        std::string const definition =
            "<rect width='6' height='6' fill='" + p.ground.text() + "'/><path d='" +
            lines[static_cast<std::size_t>(p.pattern - 1)] + "' fill='none' stroke='" + p.ink.text() +
            (p.pattern == 2 ? "' stroke-width='2.2' stroke-linecap='round'/>" : "' stroke-width='1.3'/>");
        auto const [known, added] = patterns_.try_emplace(definition, "p" + std::to_string(patterns_.size()));
        return "url(#" + known->second + ')';
    }

    std::ostringstream out_;
    std::map<std::string, std::string> patterns_; ///< definitions, and their names
    double right_ = 0, bottom_ = 0;
};

} // namespace inspect
