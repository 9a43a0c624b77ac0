// SPDX-License-Identifier: Apache-2.0
// What a model is run on: a packed batch, its token ids, its images and videos.
#pragma once

#include <cpx/plan/media.hpp>

#include <string>
#include <vector>

namespace qwen {

/// Rows of features that a vision tower has made of images or of videos.
struct features {
    std::string name; ///< in the reference file
    cpx::media_kind kind;
    cpx::index_t layer;         ///< behind which they are added; `embedding`: they replace rows of the embedding
    std::vector<double> values; ///< (rows of the kind, hidden size)

    static constexpr cpx::index_t embedding = -1;
};

/// Which ranks have made features: of each image or frame one rank, or of all of them every rank.
enum class tower { by_item, replicated };

struct input {
    cpx::thd batch;
    std::vector<cpx::index_t> ids;
    cpx::media media;
    std::vector<features> of_media;
    tower made = tower::by_item;
    std::vector<cpx::index_t> position_ids; ///< (3, tokens), to compare with; none if the batch is of text alone
};

} // namespace qwen
