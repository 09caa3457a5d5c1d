cmake_minimum_required(VERSION 3.25)

# Checks the rows of docs/evidence/parity.md and parity_tests.md under SOURCE_DIR: as many name tests as the page says, and any other
# says why it does not: "-", "later" or "n/a: ...". test_names.cmake checks that these tests exist.
set(violations "")

foreach(page parity parity_tests)
  set(count 0)

  # Rows are handled as text, one at a time: brackets and semicolons mean something in lists.
  file(READ "${SOURCE_DIR}/docs/evidence/${page}.md" rest)
  string(REGEX MATCH "[0-9]+ rows name a test\\." said "${rest}")
  while(rest MATCHES "^([^\n]*)\n")
    set(row "${CMAKE_MATCH_1}")
    string(LENGTH "${row}" length)
    math(EXPR length "${length} + 1")
    string(SUBSTRING "${rest}" ${length} -1 rest)
    if(row MATCHES "^\\| feature |^\\|---" OR NOT row MATCHES "^\\| .* \\| (.*) \\|$|^- [^:]*: (.*)$")
      continue()
    endif()
    set(shown_by "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    if(shown_by MATCHES "^(-|later: .*|n/a: .*)$")
      continue()
    endif()
    math(EXPR count "${count} + 1")
    if(NOT shown_by MATCHES "`[A-Za-z/]+\\.[A-Za-z*]+`|`house_rules`|assertions at compile time")
      string(APPEND violations "docs/evidence/${page}.md: neither names a test nor says why there is none: ${row}\n")
    endif()
  endwhile()

  if(NOT said STREQUAL "${count} rows name a test.")
    string(APPEND violations "docs/evidence/${page}.md: ${count} rows name a test. The page says: ${said}\n")
  endif()
endforeach()
if(violations)
  message(FATAL_ERROR "\n${violations}")
endif()
