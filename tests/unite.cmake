# Writes one source file that holds the tests of SOURCES, so that what they have in common is compiled once:
#
#     cmake -D OUTPUT=united.cpp -D "SOURCES=tests/plan/halo.cpp;..." -P tests/unite.cmake
#
# First come the headers of all of them, then each in a namespace of its own, where its own #includes do nothing. A test
# that specialises templates of cpx may not stand in a namespace: it comes first.
cmake_minimum_required(VERSION 3.25)

set(headers)
set(outside)
set(inside)
foreach(source IN LISTS SOURCES)
    cmake_path(GET source PARENT_PATH folder)
    file(STRINGS ${source} lines REGEX "^#include ")
    foreach(line IN LISTS lines)
        string(REGEX REPLACE ".*\"(.+)\".*" "\\1" name "${line}")
        if(EXISTS ${folder}/${name})
            set(line "#include \"${folder}/${name}\"")
        endif()
        list(APPEND headers ${line})
    endforeach()

    file(STRINGS ${source} specialised REGEX "^template <>")
    if(specialised)
        string(APPEND outside "#include \"${source}\"\n")
    else()
        cmake_path(GET folder FILENAME floor)
        cmake_path(GET source STEM name)
        string(APPEND inside "namespace test_${floor}_${name} {\n#include \"${source}\"\n}\n")
    endif()
endforeach()
list(REMOVE_DUPLICATES headers)
list(JOIN headers "\n" headers)
file(WRITE ${OUTPUT} "${headers}\n${outside}${inside}")
