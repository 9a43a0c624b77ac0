// SPDX-License-Identifier: Apache-2.0
// All cases of other projects that cpx knows of: where each is tested, or why there is nothing to test.
#include <doctest/doctest.h>

#include <support/files.hpp>

#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

/// Where a case stands: a passage of a file below tests/. No file: there is nothing to test here, for that reason.
struct entry {
    char const *id, *file, *passage;
};

// F, G, X: flash-linear-attention. M: miles. N: Megatron-LM. T: TransformerEngine. K: twinkle. A: MagiAttention.
// Z: attention-gym.
std::vector<entry> const entries = {
    {"F1", "peers/convolution.cpp", "{\"F1\""},
    {"F2", "peers/convolution.cpp", "{\"F2\""},
    {"F3", "peers/convolution.cpp", "{\"F3\""},
    {"F4", "peers/convolution.cpp", "{\"F4\""},
    {"F5", "peers/convolution.cpp", "{\"F5\""},
    {"F6", "peers/convolution.cpp", "{\"F6a\""},
    {"F7", "peers/convolution.cpp", "{\"F7\""},
    {"F8", "peers/convolution.cpp", "{\"F8a\""},
    {"F9", "peers/convolution.cpp", "{\"F9\""},
    {"F10", "peers/convolution.cpp", "{\"F10\""},
    {"G1", "peers/delta_rule.cpp", "{\"G1\""},
    {"G2", "peers/delta_rule.cpp", "{\"G2\""},
    {"G3", "peers/delta_rule.cpp", "{\"G3\""},
    {"G4", "peers/delta_rule.cpp", "{\"G4\""},
    {"G5", "peers/delta_rule.cpp", "{\"G5\""},
    {"G6", "peers/delta_rule.cpp", "{\"G6\""},
    {"G7", "peers/delta_rule.cpp", "{\"G7\""},
    {"G8", "peers/delta_rule.cpp", "{\"G8\""},
    {"G9", "peers/delta_rule.cpp", "{\"G9a\""},
    {"G10", nullptr, "Kimi delta attention decays every channel by itself: no operator of cpx"},
    {"G11", nullptr, "DPLR, of RWKV-7, adds a vector of low rank to the decay: no operator of cpx"},
    {"G12", "peers/convolution.cpp", "{\"G12a\""},
    {"X1", "layout/peers.cpp", "flash-linear-attention rejects 10 tokens on 3 ranks"}, // any lengths are legal here
    {"X1, as a layer", "peers/layer.cpp", "{\"X1a\""},
    {"X2", "plan/peers.cpp", "{{0, 5, 12}, 3"},
    {"X2, as a layer", "peers/layer.cpp", "{\"X2a\""},
    {"M1", "peers/layer.cpp", "{\"M1a\""},
    {"M2", "peers/layer.cpp", "{\"M2a\""},
    {"M2, global ranks", nullptr, "a rank of cpx is its place in the group; only a transport knows world ranks"},
    {"M3", "peers/layer.cpp", "{\"M3\""},
    {"M4", "peers/layer.cpp", "{\"M4\""},
    {"M5", "peers/layer.cpp", "{\"M5a\""},
    {"M6", "peers/exchange.cpp", "{\"M6a\""},
    {"M7", "peers/exchange.cpp", "{\"M7b\""},
    {"M8", "peers/layer.cpp", "{\"M8a\""},
    {"M9", "peers/exchange.cpp", "{\"M9a\""},
    {"M10", "peers/exchange.cpp", "TEST_CASE(\"M10"},
    {"M11", "peers/exchange.cpp", "M11"},
    {"M12", "peers/exchange.cpp", "TEST_CASE(\"M12"},
    {"M13", "peers/exchange.cpp", "{\"M13a\""},
    {"M14", "compile_fail/operators.cpp", "expect: causal_conv1d of tensors"},
    {"M14, after a relayout", "peers/exchange.cpp", "{\"M14a\""},
    {"M-a", "peers/exchange.cpp", "{\"M6b\""},
    {"M-b", "peers/layer.cpp", "{\"M-b2\""},
    {"M-c", "peers/exchange.cpp", "{\"M-c1\""},
    {"M-d", "layout/peers.cpp", "slice(11, 7, 4, 2) == list{1, 2}"},
    {"M-e", "peers/exchange.cpp", "{\"M-e1\""},
    {"M-e, as a loss", "ops/token_loss.cpp", "34017"},
    {"M-f", nullptr,
     "figures of a trained model: 0.0121 on one rank, 0.0113 and 0.0105 on two, about 0.001 when mended"},
    {"N1", "peers/layer.cpp", "{\"N1a\""},
    {"N1, sequence parallel", nullptr, "TP gathers the rows before the layer and scatters them after it"},
    {"N2", "peers/layer.cpp", "{\"N2a\""},
    {"N3", "peers/layer.cpp", "{\"N3a\""},
    {"N4", "core/packing.cpp", "{0, 505, 1008}"},
    {"N4, the last offsets", "core/packing.cpp", "{0, 64, 126}"},
    {"N4, as a layer", "peers/layer.cpp", "{\"N4a\""},
    {"N5", "peers/exchange.cpp", "{\"N5a\""},
    {"N6", nullptr, "the second gated delta net has gates of its own: no operator of cpx"},
    {"T1", "layout/peers.cpp", "Transformer Engine, test of the THD partition"},
    {"T2", "peers/exchange.cpp", "{\"T2a\""},
    {"T3", "core/packing.cpp", "{0, 6, 18, 24, 36}"},
    {"T4", "core/packing.cpp", "{1, 1, 0, 0, 2, 2, 2, 0}"},
    {"T5", "core/packing.cpp", "list{2, 6, 12}"},
    {"T5, half of a tensor", "layout/peers.cpp", "thd_read_half_tensor of cu_seqlens 0 8 16"},
    {"T5, one rank", "layout/peers.cpp", "Transformer Engine, one rank"},
    {"T5, dimensions", nullptr, "tensors of one and of two dimensions: rows of cpx have one shape"},
    {"T6", "peers/attention.cpp", "{\"T6a\""},
    {"T6, fp8", nullptr, "the host computes in float32 and float64"},
    {"K1", "peers/layer.cpp", "{\"K1b\""},
    {"K1, logits and loss", "examples/qwen.cpp", "a training step of both models has the gradients of transformers"},
    {"A1", "peers/exchange.cpp", "{\"A1a\""},
    {"Z1", "peers/convolution.cpp", "{\"Z1a\""},
    {"Z1, as a layer", "peers/layer.cpp", "{\"Z1e\""},
};

std::string text(std::string const& file) {
    std::ifstream in(std::string(support::source_dir) + "/tests/" + file);
    std::ostringstream all;
    all << in.rdbuf();
    return all.str();
}

} // namespace

TEST_SUITE("peers") {
    TEST_CASE("every case of a peer is tested where the catalogue says, or has a reason not to be") {
        std::set<std::string> ids;
        for (entry const& e : entries) {
            std::string const id = e.id;
            CAPTURE(id);
            CHECK(ids.insert(id).second);
            if (e.file)
                CHECK_MESSAGE(text(e.file).find(e.passage) != std::string::npos, e.file);
            else
                CHECK(!std::string(e.passage).empty());
        }
        auto const numbered = [&](char const* prefix, int last) {
            for (int i = 1; i <= last; ++i) CHECK(ids.contains(prefix + std::to_string(i)));
        };
        numbered("F", 10);
        numbered("G", 12);
        numbered("X", 2);
        numbered("M", 14);
        for (char const* id : {"M-a", "M-b", "M-c", "M-d", "M-e", "M-f", "K1", "A1", "Z1"}) CHECK(ids.contains(id));
        numbered("N", 6);
        numbered("T", 6);
    }
}
