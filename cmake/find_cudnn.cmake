# Looks for the headers of cuDNN 9 and of its frontend, where cpx is built and where its package is found: CUDNN_ROOT,
# build/cudnn, or the wheels nvidia-cudnn-frontend and nvidia-cudnn, known to python3. Makes the target cpx::cudnn, or
# says that attention by cuDNN is left out. The library itself is loaded when a program asks for it.
include(${CMAKE_CURRENT_LIST_DIR}/python_wheels.cmake)
set(cpx_cudnn_folders ${CUDNN_ROOT} $ENV{CUDNN_ROOT} ${CMAKE_CURRENT_LIST_DIR}/../build/cudnn ${cpx_wheels})
find_path(CUDNN_FRONTEND_INCLUDE_DIR cudnn_frontend.h HINTS ${cpx_cudnn_folders} PATH_SUFFIXES include)
find_path(CUDNN_INCLUDE_DIR cudnn_graph.h HINTS ${cpx_cudnn_folders} ${CUDAToolkit_INCLUDE_DIRS}
    PATH_SUFFIXES include nvidia/cudnn/include)
mark_as_advanced(CUDNN_FRONTEND_INCLUDE_DIR CUDNN_INCLUDE_DIR)

if(CUDNN_FRONTEND_INCLUDE_DIR AND CUDNN_INCLUDE_DIR AND NOT TARGET cpx::cudnn)
    add_library(cpx::cudnn INTERFACE IMPORTED GLOBAL)
    set_target_properties(cpx::cudnn PROPERTIES
        INTERFACE_INCLUDE_DIRECTORIES "${CUDNN_FRONTEND_INCLUDE_DIR};${CUDNN_INCLUDE_DIR}"
        INTERFACE_COMPILE_DEFINITIONS NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
        INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}")
elseif(NOT TARGET cpx::cudnn)
    message(STATUS "cpx: cuDNN's headers, or its frontend's, are not found: attention by cuDNN is left out")
endif()
