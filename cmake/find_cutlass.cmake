# Looks for the headers of NVIDIA CUTLASS, 3.5 or newer, where cpx is built and where its package is found: the CMake
# package, CUTLASS_ROOT, or the wheel nvidia-cutlass, unpacked in CUTLASS_ROOT or known to python3. Makes the target
# cpx::cutlass, or says that kernels which want them are left out.
find_package(NvidiaCutlass QUIET)
if(TARGET nvidia::cutlass::cutlass)
    get_target_property(cpx_cutlass_folders nvidia::cutlass::cutlass INTERFACE_INCLUDE_DIRECTORIES)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/python_wheels.cmake)
find_path(CUTLASS_INCLUDE_DIR cute/arch/mma_sm90_gmma.hpp
    HINTS ${cpx_cutlass_folders} ${CUTLASS_ROOT} $ENV{CUTLASS_ROOT} ${CMAKE_CURRENT_LIST_DIR}/../build/cutlass
        ${cpx_wheels}
    PATH_SUFFIXES include cutlass_library/source/include)
mark_as_advanced(CUTLASS_INCLUDE_DIR)

if(CUTLASS_INCLUDE_DIR AND NOT TARGET cpx::cutlass)
    add_library(cpx::cutlass INTERFACE IMPORTED GLOBAL)
    set_target_properties(cpx::cutlass PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${CUTLASS_INCLUDE_DIR}")
elseif(NOT CUTLASS_INCLUDE_DIR)
    message(STATUS "cpx: CUTLASS's headers are not found: the gated delta rule on GPUs takes its plain path only")
endif()
