# Writes include/cpx/cpx.hpp and everything of cpx that it includes into one file:
#
#     cmake -D OUTPUT=single_include/cpx/cpx.hpp -P cmake/amalgamate.cmake
#
# Each header comes once, after those it includes. Standard includes are collected at the top, which is right as long as
# none of them stands under an #if; other includes stay where they are.
cmake_minimum_required(VERSION 3.25)
cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH root)
set(done)
set(standard)
set(body)

macro(append_header name) # a macro, because it calls itself and the three variables above are shared
    list(APPEND done ${name})
    file(READ ${root}/include/${name} text)
    string(REGEX MATCHALL "#include <cpx/[^>\n]+>" needs "${text}")
    foreach(need IN LISTS needs)
        string(REGEX REPLACE "#include <(.+)>" "\\1" need "${need}")
        if(NOT need IN_LIST done)
            append_header(${need})
        endif()
    endforeach()

    file(READ ${root}/include/${name} text)
    string(REGEX MATCHALL "\n#include <[a-z0-9_]+>" found "${text}")
    list(APPEND standard ${found})
    string(REGEX REPLACE "\n#include <(cpx/|[a-z0-9_]+>)[^\n]*" "" text "\n${text}")
    string(REGEX REPLACE "\n(// SPDX-[^\n]*|#pragma once)" "" text "${text}")
    string(REGEX REPLACE "\n\n\n+" "\n\n" text "${text}")
    string(STRIP "${text}" text)
    string(APPEND body "\n// ${name}\n${text}\n")
endmacro()

append_header(cpx/cpx.hpp)

list(REMOVE_DUPLICATES standard)
list(SORT standard)
list(JOIN standard "" standard)
file(READ ${root}/include/cpx/cpx.hpp text)
string(REGEX MATCH "// SPDX-[^\n]*" licence "${text}")
set(text "${licence}\n")
string(APPEND text "// The host side of cpx in one file, made from include/cpx by cmake/amalgamate.cmake: do not edit.\n")
string(APPEND text "#ifndef CPX_SINGLE_INCLUDE\n#define CPX_SINGLE_INCLUDE\n${standard}\n${body}\n#endif\n")
file(WRITE "${OUTPUT}" "${text}")
