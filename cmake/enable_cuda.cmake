# Enables CUDA, where cpx is built: for the GPUs of this machine if there are some, else for Hopper, unless
# CMAKE_CUDA_ARCHITECTURES or CUDAARCHS say for which.
set(own_gpus OFF)
if(NOT CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 90a-real) # Hopper and its own instructions; 80 and up are the portable ones
    set(own_gpus ON)
endif()
enable_language(CUDA)
if(own_gpus AND CMAKE_CUDA_ARCHITECTURES_NATIVE MATCHES "^[0-9]") # where CMake has found none, it is another text
    set(CMAKE_CUDA_ARCHITECTURES ${CMAKE_CUDA_ARCHITECTURES_NATIVE})
endif()
find_package(CUDAToolkit REQUIRED GLOBAL)
