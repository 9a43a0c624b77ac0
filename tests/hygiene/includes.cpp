// SPDX-License-Identifier: Apache-2.0
// Every file includes what it uses of the standard library, itself or by headers of this repository that it includes:
// standard headers bring other ones along as they like, and with the next compiler they do not.
#include <doctest/doctest.h>

#include <support/files.hpp>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;
using names = std::set<std::string>;

/// A line a header: its name, then names of std that it brings for certain. One of a name's headers is enough.
constexpr char const* promised = R"(
algorithm all_of any_of binary_search clamp copy copy_n count count_if equal fill fill_n find find_if for_each
algorithm includes is_permutation is_sorted is_sorted_until lower_bound max max_element min min_element minmax
algorithm mismatch none_of next_permutation nth_element partial_sort remove_if replace reverse rotate search shuffle
algorithm sort stable_sort transform unique upper_bound
array array begin data end get size ssize to_array
atomic atomic atomic_ref memory_order_acq_rel memory_order_acquire memory_order_relaxed memory_order_release
barrier barrier
bit bit_cast bit_ceil bit_floor bit_width countl_zero countr_zero endian has_single_bit popcount
charconv chars_format errc from_chars to_chars
chrono chrono chrono_literals
cctype isalnum isalpha isdigit isprint isspace tolower toupper
cmath abs ceil copysign cos exp exp2 expm1 floor fma fmod hypot ilogb isfinite isinf isnan ldexp log log1p log2 lrint
cmath nan nanf nextafter pow round signbit sin sqrt tan tanh
complex complex
compare partial_ordering strong_ordering
concepts constructible_from convertible_to copy_constructible copyable default_initializable derived_from
concepts equality_comparable floating_point integral invocable move_constructible predicate regular same_as
concepts signed_integral totally_ordered unsigned_integral
condition_variable condition_variable
csignal raise signal
cstddef byte max_align_t nullptr_t ptrdiff_t size_t
cstdint int16_t int32_t int64_t int8_t intmax_t intptr_t uint16_t uint32_t uint64_t uint8_t uintmax_t uintptr_t
cstdio FILE fclose ferror fflush fgets fopen fprintf fputs fread freopen fwrite printf puts remove rename size_t
cstdio snprintf
cstdlib _Exit abort abs aligned_alloc exit free getenv malloc size_t strtod strtol system
cstring memcmp memcpy memmove memset size_t strcmp strerror strlen
deque begin data deque end erase erase_if initializer_list size ssize
exception current_exception exception exception_ptr make_exception_ptr rethrow_exception rethrow_if_nested terminate
exception throw_with_nested uncaught_exceptions
filesystem error_code filesystem
format format
fstream fstream ifstream ios istream ofstream ostream streamsize
functional bind_front cref equal_to function greater hash identity invoke less minus plus reference_wrapper ref
future async future launch promise
initializer_list initializer_list
iomanip setfill setprecision setw
ios ios streamsize
iostream cerr cin cout endl flush ios istream ostream streamsize
istream getline ios istream streamsize
iterator advance back_inserter begin bidirectional_iterator data end forward_iterator input_iterator istreambuf_iterator
iterator iter_reference_t iter_value_t next prev random_access_iterator reverse_iterator size ssize
latch latch
limits numeric_limits
map begin data end erase_if initializer_list map multimap size ssize
memory addressof allocator construct_at destroy_at enable_shared_from_this make_shared make_unique
memory make_unique_for_overwrite shared_ptr unique_ptr weak_ptr
mutex call_once lock_guard mutex once_flag scoped_lock unique_lock
new align_val_t bad_alloc launder
numbers numbers
numeric accumulate exclusive_scan gcd inclusive_scan inner_product iota lcm midpoint partial_sum reduce transform_reduce
optional nullopt optional
ostream endl flush ios ostream
random mt19937 mt19937_64 random_device normal_distribution uniform_int_distribution uniform_real_distribution
ranges borrowed_range contiguous_range iota_view output_range random_access_range range range_reference_t range_value_t
ranges sized_range views
regex regex regex_match regex_replace regex_search smatch sregex_iterator
set begin data end erase_if initializer_list multiset set size ssize
shared_mutex shared_lock shared_mutex
source_location source_location
span as_bytes as_writable_bytes begin data dynamic_extent end size span ssize
sstream ios istringstream ostringstream stringstream
stdexcept domain_error invalid_argument length_error logic_error out_of_range overflow_error runtime_error
stop_token stop_source stop_token
string begin char_traits data end erase erase_if getline initializer_list size ssize stod stoi stol stoll stoul stoull
string string to_string
string_view begin data end size ssize string_view
system_error errc error_code generic_category system_category system_error
thread jthread this_thread thread
tuple apply forward_as_tuple get ignore make_tuple tie tuple tuple_element_t tuple_size_v
type_traits add_const_t common_type_t conditional_t decay_t enable_if_t false_type integral_constant invoke_result_t
type_traits is_arithmetic_v is_array_v is_base_of_v is_const_v is_constant_evaluated is_constructible_v is_convertible_v
type_traits is_class_v is_default_constructible_v is_empty_v is_enum_v is_floating_point_v is_integral_v
type_traits is_invocable_r_v is_invocable_v is_lvalue_reference_v is_member_pointer_v is_object_v
type_traits has_unique_object_representations_v
type_traits is_nothrow_move_constructible_v is_pointer_v is_same is_same_v is_signed_v is_trivially_copyable_v
type_traits is_unsigned_v is_void_v make_signed_t make_unsigned_t remove_const_t remove_cv_t remove_cvref_t
type_traits remove_pointer_t remove_reference_t true_type type_identity type_identity_t underlying_type_t void_t
typeindex type_index
typeinfo type_info
unordered_map begin data end erase_if initializer_list size ssize unordered_map
unordered_set begin data end erase_if initializer_list size ssize unordered_set
utility as_const cmp_equal cmp_greater cmp_greater_equal cmp_less cmp_less_equal declval exchange forward get in_range
utility index_sequence index_sequence_for integer_sequence make_index_sequence make_pair move pair piecewise_construct
utility swap to_underlying unreachable
variant get get_if holds_alternative monostate variant visit
vector begin data end erase erase_if initializer_list size ssize vector
)";

/// Returns the headers of every name.
std::map<std::string, names> headers() {
    std::map<std::string, names> result;
    std::istringstream lines(promised);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string header;
        words >> header;
        for (std::string name; words >> name;) result[name].insert(header);
    }
    return result;
}

struct source {
    names standard;             ///< headers between brackets that are not ours
    std::vector<fs::path> ours; ///< headers of this repository
    names uses;                 ///< names after std::
};

/// Returns the text without comments and without what stands between quotes. Raw strings are not looked for.
std::string code(std::string const& text) {
    std::string result;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text.compare(i, 2, "//") == 0) i = std::min(text.find('\n', i), text.size() - 1);
        if (text[i] == '"' && (i == 0 || text[i - 1] != '\''))
            for (++i; i < text.size() && text[i] != '"' && text[i] != '\n'; ++i) i += text[i] == '\\';
        else
            result += text[i];
    }
    return result;
}

/// Returns the word that begins at `at`, which then stands behind it.
std::string word(std::string const& text, std::size_t& at) {
    std::size_t const first = at;
    while (at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) || text[at] == '_')) ++at;
    return text.substr(first, at - first);
}

class repository {
public:
    repository() {
        for (char const* folder : folders)
            for (auto const& entry : fs::recursive_directory_iterator(root_ / folder))
                if (auto const kind = entry.path().extension().string();
                    kind == ".hpp" || kind == ".cpp" || kind == ".cuh" || kind == ".cu")
                    files.emplace(entry.path().lexically_normal(), source());
        for (auto& [path, file] : files) read(path, file);
    }

    /// Returns the standard headers that a file has by itself and by our headers.
    names closure(fs::path const& path) const {
        std::set<fs::path> seen;
        std::vector<fs::path> open = {path};
        names result;
        while (!open.empty()) {
            fs::path const next = open.back();
            open.pop_back();
            if (!seen.insert(next).second) continue;
            source const& file = files.at(next);
            result.insert(file.standard.begin(), file.standard.end());
            open.insert(open.end(), file.ours.begin(), file.ours.end());
        }
        return result;
    }

    std::map<fs::path, source> files;

private:
    static constexpr char const* folders[] = {"include", "kernels", "tests", "examples", "bench", "harness"};

    void read(fs::path const& path, source& file) {
        std::ifstream in(path);
        std::string const text{std::istreambuf_iterator<char>(in), {}};
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);)
            if (std::size_t const at = line.find("#include "); at == line.find_first_not_of(' ') && at < line.size())
                include(path, line.substr(at + 10, line.find_first_of(">\"", at + 10) - at - 10), file);

        std::string const plain = code(text);
        for (auto at = plain.find("std::"); at != std::string::npos; at = plain.find("std::", at)) {
            at += 5;
            std::string name = word(plain, at);
            if (name == "ranges" && plain.compare(at, 2, "::") == 0) name = word(plain, at += 2);
            if (!name.empty()) file.uses.insert(name);
        }
    }

    /// Notes one #include: of ours, if such a file stands beside `from` or in one of the folders.
    void include(fs::path const& from, std::string const& name, source& file) const {
        std::vector<fs::path> places = {from.parent_path() / name};
        for (char const* folder : folders) places.push_back(root_ / folder / name);
        for (fs::path const& place : places)
            if (files.contains(place.lexically_normal())) {
                file.ours.push_back(place.lexically_normal());
                return;
            }
        file.standard.insert(name);
    }

    fs::path const root_ = support::source_dir;
};

} // namespace

TEST_SUITE("hygiene") {
    TEST_CASE("every file includes what it uses of the standard library, itself or by ours that it includes") {
        auto const known = headers();
        repository const all;
        REQUIRE(all.files.size() > 200);
        for (auto const& [given_path, file] : all.files) {
            auto const& path = given_path;
            CAPTURE(path.string());
            names const has = all.closure(path);
            for (std::string const& name : file.uses) {
                CAPTURE(name);
                auto const found = known.find(name);
                CHECK_MESSAGE(found != known.end(), "this name is not in the list above");
                if (found == known.end()) continue;
                CHECK_MESSAGE(std::ranges::any_of(found->second, [&](auto const& h) { return has.contains(h); }),
                              "none of its headers is included, such as <" << *found->second.begin() << ">");
            }
        }
    }
}
