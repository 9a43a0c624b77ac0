# What tests, examples, cpx::ops and cpx::model need: the installed package, else a pinned download.
include(FetchContent)

# cpx_headers(<package> <version> <target> <folder to include> <url> <sha256>): a library that is headers only.
# Downloaded, it becomes an imported target, so that nothing of its own build is run, exported or warned about.
function(cpx_headers package version target folder url sha256)
    FetchContent_Declare(${package} URL ${url} URL_HASH SHA256=${sha256} SOURCE_SUBDIR none
        FIND_PACKAGE_ARGS ${version} GLOBAL)
    FetchContent_MakeAvailable(${package})
    if(NOT TARGET ${target})
        string(TOLOWER ${package} lower)
        add_library(${target} INTERFACE IMPORTED GLOBAL)
        target_include_directories(${target} INTERFACE ${${lower}_SOURCE_DIR}/${folder})
    endif()
endfunction()

# cpx_need(<package>): makes the package's target known, in every directory.
function(cpx_need package)
    set(CMAKE_COMPILE_WARNING_AS_ERROR OFF)
    set(CMAKE_VERIFY_INTERFACE_HEADER_SETS OFF)
    set(BENCHMARK_ENABLE_TESTING OFF)
    set(BENCHMARK_ENABLE_INSTALL OFF)
    set(github https://github.com)
    if(package STREQUAL Eigen3)
        cpx_headers(Eigen3 3.4 Eigen3::Eigen . https://gitlab.com/libeigen/eigen/-/archive/3.4.0/eigen-3.4.0.tar.bz2
            b4c198460eba6f28d34894e3a5710998818515104d6e74e5cc331ce31e46e626)
    elseif(package STREQUAL nlohmann_json)
        cpx_headers(nlohmann_json 3.11 nlohmann_json::nlohmann_json include
            ${github}/nlohmann/json/releases/download/v3.11.2/json.tar.xz
            8c4b26bf4b422252e13f332bc5e388ec0ab5c3443d24399acb675e68278d341f)
    elseif(package STREQUAL CLI11)
        cpx_headers(CLI11 2.1 CLI11::CLI11 include ${github}/CLIUtils/CLI11/archive/v2.1.2.tar.gz
            26291377e892ba0e5b4972cdfd4a2ab3bf53af8dac1f4ea8fe0d1376b625c8cb)
    elseif(package STREQUAL doctest)
        cpx_headers(doctest 2.4 doctest::doctest . ${github}/doctest/doctest/archive/v2.4.9.tar.gz
            19b2df757f2f3703a5e63cee553d85596875f06d91a3333acd80a969ef210856)
    elseif(package STREQUAL rapidcheck)
        FetchContent_Declare(rapidcheck SYSTEM
            URL ${github}/emil-e/rapidcheck/archive/ff6af6fc683159deb51c543b065eba14dfcf329b.zip
            URL_HASH SHA256=60951dbc4de162622f51a4a34117c269a9921833a51dddce36f4cc80a5f7cf9f
            FIND_PACKAGE_ARGS GLOBAL)
        FetchContent_MakeAvailable(rapidcheck)
    elseif(package STREQUAL benchmark)
        FetchContent_Declare(benchmark SYSTEM
            URL ${github}/google/benchmark/archive/v1.7.1.tar.gz
            URL_HASH SHA256=6430e4092653380d9dc4ccb45a1e2dc9259d581f4866dc0759713126056bc1d7
            FIND_PACKAGE_ARGS 1.7 GLOBAL)
        FetchContent_MakeAvailable(benchmark)
    endif()
endfunction()
