// SPDX-License-Identifier: Apache-2.0
// What the program that decodes with a checkpoint refuses.
#include <examples/program.hpp>

#include <support/files.hpp>

#include <string>
#include <vector>

namespace {

using namespace program;
using arguments = std::vector<std::string>;

fs::path const data = fs::path(support::source_dir) / "examples/data/tiny_qwen3_5";
arguments const few{"--ranks", "2", "--tokens", "1"};

} // namespace

TEST_SUITE("examples") {
    TEST_CASE("decoding: a NaN in a weight or in the reference is no agreement") {
        copies const c(data, few);
        CHECK(run(c.options()).code == 0); // so that what follows is refused for what it changes
        archive model(data / "model.safetensors");
        model.poison("model.norm.weight");
        model.save(c.model / "model.safetensors");
        check_refusal(c.options(), {"decode: ", "log-probability 0", "expected a number", "nan"});
        fs::copy_file(data / "model.safetensors", c.model / "model.safetensors", fs::copy_options::overwrite_existing);

        archive expected(data / "reference.safetensors");
        expected.poison("logprobs");
        expected.save(c.expected);
        check_refusal(c.options(),
                      {"decode: ", "expected.safetensors", "log-probability 0", "expected a number", "nan"});
    }

    TEST_CASE("decoding: tokens that the model has not and sequences that are none are refused") {
        copies const c(data, few);
        archive const good(data / "reference.safetensors");
        auto const refuse = [&](std::string const& tensor, std::size_t i, std::int64_t value,
                                arguments const& passages) {
            auto damaged = good;
            damaged.set(tensor, i, value);
            damaged.save(c.expected);
            check_refusal(c.options(), arguments{"decode: ", "expected.safetensors"} + passages);
        };
        std::size_t const last = good.tensors.at("cu_seqlens").shape[0].get<std::size_t>() - 1;
        refuse("input_ids", 17, 256, {"token id 17", "expected 0 to 255", "got 256"});
        refuse("input_ids", 3, -1, {"token id 3", "expected 0 to 255", "got -1"});
        refuse("input_ids", 0, std::int64_t{1} << 62, {"token id 0", "got 4611686018427387904"});
        refuse("cu_seqlens", last, 127, {"last offset", "128", "got 127"});
        refuse("cu_seqlens", last, 129, {"last offset", "128", "got 129"});
        refuse("cu_seqlens", 2, 1, {"offset 2 decreases", "expected at least", "got 1"});
        refuse("cu_seqlens", 0, 1, {"offset 0", "expected 0", "got 1"});
        good.save(c.expected);
        CHECK(run(c.options()).code == 0);
    }
}
