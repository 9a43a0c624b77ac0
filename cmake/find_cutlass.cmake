# Looks for the headers of NVIDIA CUTLASS, 3.5 or newer, where cpx is built and where its package is found: the CMake
# package, CUTLASS_ROOT, or the wheel nvidia-cutlass, unpacked in CUTLASS_ROOT or known to python3. Makes the target
# cpx::cutlass, or says that kernels which want them are left out.
find_package(NvidiaCutlass QUIET)
if(TARGET nvidia::cutlass::cutlass)
    get_target_property(cpx_cutlass_folders nvidia::cutlass::cutlass INTERFACE_INCLUDE_DIRECTORIES)
endif()
include(${CMAKE_CURRENT_LIST_DIR}/python_wheels.cmake)
find_path(CUTLASS_INCLUDE_DIR cute/arch/mma_sm90_gmma.hpp
    HINTS ${CUTLASS_ROOT} $ENV{CUTLASS_ROOT} ${cpx_cutlass_folders} ${CMAKE_CURRENT_LIST_DIR}/../build/cutlass
        ${cpx_wheels}
    PATH_SUFFIXES include cutlass_library/source/include)
mark_as_advanced(CUTLASS_INCLUDE_DIR)
if(CUTLASS_INCLUDE_DIR)
    set(cpx_cutlass_version 0)
    if(EXISTS ${CUTLASS_INCLUDE_DIR}/cutlass/version.h)
        file(STRINGS ${CUTLASS_INCLUDE_DIR}/cutlass/version.h cpx_cutlass_version REGEX "define CUTLASS_M(AJ|IN)OR ")
        string(REGEX REPLACE "[^0-9;]" "" cpx_cutlass_version "${cpx_cutlass_version}")
        string(REPLACE ";" "." cpx_cutlass_version "${cpx_cutlass_version}")
    endif()
    if(cpx_cutlass_version VERSION_LESS 3.5)
        message(STATUS "cpx: CUTLASS in ${CUTLASS_INCLUDE_DIR} is ${cpx_cutlass_version}, older than 3.5")
        set(CUTLASS_INCLUDE_DIR CUTLASS_INCLUDE_DIR-NOTFOUND)
    endif()
endif()

if(CUTLASS_INCLUDE_DIR AND NOT TARGET cpx::cutlass)
    add_library(cpx::cutlass INTERFACE IMPORTED GLOBAL)
    set_target_properties(cpx::cutlass PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${CUTLASS_INCLUDE_DIR}")
elseif(NOT CUTLASS_INCLUDE_DIR)
    message(STATUS "cpx: CUTLASS's headers are not found: the gated delta rule on GPUs takes its plain path only")
endif()
