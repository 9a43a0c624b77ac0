# Looks for NCCL, where cpx is built and where its package is found: in NCCL_ROOT, an installation or the folder
# nvidia/nccl of a wheel, or beside CUDA's files, whose toolkit its caller has found. Makes the target cpx::libnccl, or
# sets cpx_nccl_missing to what was not found.
find_path(NCCL_INCLUDE_DIR nccl_device.h HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} ${CUDAToolkit_INCLUDE_DIRS}
    PATH_SUFFIXES include)
find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 NAMES_PER_DIR
    HINTS ${NCCL_ROOT} $ENV{NCCL_ROOT} ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib64
    PATH_SUFFIXES lib lib64)
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
    if(NOT NCCL_INCLUDE_DIR IN_LIST CUDAToolkit_INCLUDE_DIRS)
        set_target_properties(cpx::libnccl PROPERTIES SYSTEM OFF) # or an NCCL of the toolkit's would come before it
    endif()
endif()
