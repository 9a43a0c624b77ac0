# Looks for NCCL, where cpx is built and where its package is found: makes the target cpx::libnccl, or sets
# cpx_nccl_missing to what was not found. Its caller has found CUDAToolkit, beside whose files NCCL's may lie.
find_path(NCCL_INCLUDE_DIR nccl_device.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib64)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

set(cpx_nccl_missing)
if(NOT NCCL_INCLUDE_DIR)
    list(APPEND cpx_nccl_missing "nccl_device.h (NCCL 2.28 or newer)")
endif()
if(NOT NCCL_LIBRARY)
    list(APPEND cpx_nccl_missing "libnccl")
endif()
list(JOIN cpx_nccl_missing " and " cpx_nccl_missing)

if(NOT cpx_nccl_missing AND NOT TARGET cpx::libnccl)
    add_library(cpx::libnccl UNKNOWN IMPORTED GLOBAL)
    set_target_properties(cpx::libnccl PROPERTIES
        IMPORTED_LOCATION "${NCCL_LIBRARY}" INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
endif()
