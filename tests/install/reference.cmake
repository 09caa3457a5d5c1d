cmake_minimum_required(VERSION 3.25)

# Builds the API reference in BUILD_DIR, which fails when a public name has no comment; checks that it covers all headers of README's
# guide; and proves that it can fail, with a header of its own under WORK_DIR.
file(READ "${SOURCE_DIR}/README.md" guide)
string(REGEX REPLACE "^.*\n## Guide to the headers\n" "" guide "${guide}")
string(REGEX REPLACE "\n## .*$" "" guide "${guide}")
string(REGEX MATCHALL "`[a-z_]+/[a-z_/]+\\.h`" named "${guide}")
list(LENGTH named count)
if(count LESS 10)
  message(FATAL_ERROR "README.md has no guide to the headers any more: ${named}")
endif()
foreach(header IN LISTS named)
  string(REPLACE "`" "" header "${header}")
  if(NOT header STREQUAL "stitch/stitch.h" AND NOT header IN_LIST HEADERS)
    message(FATAL_ERROR "README.md's guide names ${header}, which cmake/StitchReference.cmake does not list")
  endif()
endforeach()

execute_process(COMMAND "${CMAKE_COMMAND}" --build "${BUILD_DIR}" --target docs
  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "the API reference cannot be built:\n${output}")
endif()
foreach(page classstitch_1_1Worker classstitch_1_1RRef classstitch_1_1optim_1_1DistributedOptimizer)
  if(NOT EXISTS "${BUILD_DIR}/docs/html/${page}.html")
    message(FATAL_ERROR "the API reference has no page ${page}.html")
  endif()
endforeach()

# Each of these has to fail the build of the reference, the first alone not.
function(expect_result declaration expected)
  file(WRITE "${WORK_DIR}/header.h" "#pragma once\n\nnamespace stitch {\n\n${declaration}\n\n}  // namespace stitch\n")
  file(WRITE "${WORK_DIR}/Doxyfile"
    "@INCLUDE = \"${DOXYFILE}\"\nINPUT = \"${WORK_DIR}/header.h\" \"${SOURCE_DIR}/docs/reference/main_page.dox\"\n"
    "OUTPUT_DIRECTORY = \"${WORK_DIR}\"\nWARN_IF_DOC_ERROR = NO\n")
  execute_process(COMMAND "${DOXYGEN}" "${WORK_DIR}/Doxyfile" RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(expected STREQUAL "" AND NOT result EQUAL 0)
    message(FATAL_ERROR "the reference of\n${declaration}\nfails:\n${output}")
  elseif(NOT expected STREQUAL "" AND (result EQUAL 0 OR NOT output MATCHES "${expected}"))
    message(FATAL_ERROR "the reference of\n${declaration}\ndoes not fail for ${expected}: ${result}\n${output}")
  endif()
endfunction()
expect_result("// Has a comment.\nint documented();\nint documented(int overload);" "")
expect_result("// Has a comment.\nint documented();\nint undocumented();" "undocumented.. .function. of namespace stitch is not documented")
expect_result("// Has a comment.\nint documented();\n// A detached comment.\n\nint undocumented();" "undocumented.. .function.")
expect_result("// Has a comment.\nstruct Documented {\n  int field;  // has one\n  int undocumented;\n};" "undocumented .variable.")
expect_result("struct Undocumented {\n  int field;\n};" "Compound stitch::Undocumented is not documented")
file(REMOVE_RECURSE "${WORK_DIR}")
