// SPDX-License-Identifier: Apache-2.0
// The part of DLPack by which a framework tells of its tensors, memory and streams without a call of Python: its types,
// as version 1.3 lays them out. https://github.com/dmlc/dlpack/blob/main/include/dlpack/dlpack.h
#pragma once

#include <cstdint>

namespace binding::dlpack {

struct version {
    std::uint32_t major, minor;
};
struct device {
    std::int32_t type, id;
};
constexpr std::int32_t cuda_device = 2;
struct data_type {
    std::uint8_t code, bits;
    std::uint16_t lanes;
};
struct tensor {
    void* data;
    device where;
    std::int32_t dimensions;
    data_type type;
    std::int64_t* shape;
    std::int64_t* strides; ///< null: side by side
    std::uint64_t byte_offset;
};
struct managed_tensor {
    version made_by;
    void* context;
    void (*release)(managed_tensor*);
    std::uint64_t flags;
    tensor of;
};

/// What the type of a framework's tensors has as its attribute `__dlpack_c_exchange_api__`, in a capsule.
struct exchange {
    version of;
    exchange const* before;
    /// Makes a tensor like `prototype`; `refuse(context, kind, message)` says why not.
    int (*allocate)(tensor* prototype, managed_tensor** made, void* context,
                    void (*refuse)(void* context, char const* kind, char const* message));
    int (*to_managed)(void* object, managed_tensor** made);
    int (*from_managed)(managed_tensor* given, void** object);
    int (*describe)(void* object, tensor* made); ///< may be null
    int (*current_stream)(std::int32_t type, std::int32_t id, void** stream);
};
constexpr char const* attribute = "__dlpack_c_exchange_api__";
constexpr char const* capsule_name = "dlpack_exchange_api";

} // namespace binding::dlpack
