# Looks for NCCL, where cpx is built and where its package is found: in NCCL_ROOT alone, an installation or the folder
# nvidia/nccl of a wheel, if that is given, so that headers and library are of one NCCL; else beside the files of CUDA,
# whose toolkit its caller has found. NCCL_INCLUDE_DIR and NCCL_LIBRARY, if they are given, are taken as they are. Makes
# the target cpx::libnccl, or sets cpx_nccl_missing to what was not found. Nothing is cached: a root may change.
set(cpx_nccl_root "${NCCL_ROOT}")
if(NOT cpx_nccl_root)
    set(cpx_nccl_root "$ENV{NCCL_ROOT}")
endif()
set(cpx_nccl_place)
if(cpx_nccl_root)
    set(cpx_nccl_place " in NCCL_ROOT, ${cpx_nccl_root}")
    find_path(NCCL_INCLUDE_DIR nccl_device.h NO_CACHE PATHS ${cpx_nccl_root} PATH_SUFFIXES include NO_DEFAULT_PATH)
    find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 NAMES_PER_DIR NO_CACHE PATHS ${cpx_nccl_root}
        PATH_SUFFIXES lib lib64 lib/${CMAKE_LIBRARY_ARCHITECTURE} NO_DEFAULT_PATH)
else()
    find_path(NCCL_INCLUDE_DIR nccl_device.h NO_CACHE HINTS ${CUDAToolkit_INCLUDE_DIRS})
    find_library(NCCL_LIBRARY nccl NO_CACHE HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib64)
endif()

set(cpx_nccl_missing)
if(NOT NCCL_INCLUDE_DIR)
    list(APPEND cpx_nccl_missing "nccl_device.h (NCCL 2.28 or newer)${cpx_nccl_place}")
endif()
if(NOT NCCL_LIBRARY)
    list(APPEND cpx_nccl_missing "libnccl${cpx_nccl_place}")
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
