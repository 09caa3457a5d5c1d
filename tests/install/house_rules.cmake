cmake_minimum_required(VERSION 3.25)

# Checks what no compiler does, in the sources under SOURCE_DIR:
#   1. A folder of the library includes only itself and the folders that the table below allows it. The table has no circle:
#      each folder names only folders that stand above it here.
#   2. Only transport/tensorpipe/ includes TensorPipe, and bench/floors_tensorpipe.cc, which measures it.
#   3. Only dist_autograd/graph/compat.h asks for a version of torch; all else looks for features there.
#   4. No headers include one another in a circle, but for the last lines of a header that is in two parts.
#   5. A source file of more than 400 lines, but for tests, says why, in a comment that begins
#      "One file, though long:".
#   6. No line is longer than 100 columns.
#   7. Comments, texts and names keep to the words of the field (CONTRIBUTING.md has the glossary).
set(violations "")
set(folders base transport rpc rref dist_autograd dist_optim)
set(outer_folders tools examples bench tests)

# The second part of a header, which it includes in its last lines: "<header> <its part>".
set(header_parts
  "rpc/future/future.h rpc/future/coroutine.h"
  "rpc/future/future.h rpc/future/future_group.h"
  "rpc/message/archive.h rpc/message/container_codec.h"
  "rpc/message/archive.h rpc/message/plain_struct.h")

# allow(folder folders...): what a folder may include beside itself. A folder has to be allowed before another may include it.
set(rooms "")
macro(allow room)
  foreach(other ${ARGN})
    if(NOT "${other}" IN_LIST rooms)
      string(APPEND violations "house_rules: ${room}/ may not be allowed ${other}/, which does not stand above it\n")
    endif()
  endforeach()
  list(APPEND rooms ${room})
  set("allowed_${room}" ${room} ${ARGN})
endmacro()
allow(base)
allow(transport/wire           base)
allow(transport                base transport/wire)
allow(transport/polling        base transport)
allow(transport/stream         base transport/wire transport transport/polling)
allow(transport/loopback       base transport)
allow(transport/faults         base transport)
allow(transport/tensorpipe     base transport)
allow(transport/selection      base transport transport/stream transport/tensorpipe)
allow(transport/store          base transport/wire transport transport/stream)
allow(transport/gpu            base transport/wire)
allow(rpc/future               base)
allow(rpc/message              base transport/wire)
allow(rpc/function             base rpc/future rpc/message)
allow(rpc/gpu                  base transport/wire transport/gpu rpc/future rpc/message)
allow(rpc/options              base transport/wire transport/faults transport/store rpc/message rpc/gpu)
allow(rpc/membership           base rpc/future rpc/message)
allow(rpc/peers                base transport transport/faults rpc/future rpc/message rpc/gpu rpc/options rpc/membership)
allow(rpc/calls                base transport rpc/future rpc/message rpc/function rpc/gpu rpc/options rpc/peers)
allow(rpc/agent                base transport transport/faults rpc/future rpc/message rpc/gpu rpc/options rpc/membership
                               rpc/peers rpc/calls)
allow(rpc/world                base transport/wire transport transport/stream transport/loopback transport/faults
                               transport/selection transport/store rpc/future rpc/message rpc/gpu rpc/options
                               rpc/membership rpc/peers rpc/calls rpc/agent)
allow(rpc                      base rpc/future rpc/message rpc/function rpc/gpu rpc/options rpc/membership rpc/peers
                               rpc/calls rpc/agent rpc/world)
allow(rref/lifetime            base)
allow(rref/files               base)
allow(rref/agent               base rpc/future rpc/message rpc/calls rpc/agent rpc rref/lifetime)
allow(rref                     base rpc/future rpc/message rpc/agent rpc rref/lifetime rref/files rref/agent)
allow(dist_autograd/graph      base rpc/message rpc/function)
allow(dist_autograd/executor   base rpc/future dist_autograd/graph)
allow(dist_autograd/protocol   base rpc/future rpc/message dist_autograd/graph dist_autograd/executor)
allow(dist_autograd            base rpc/future rpc/message rpc/calls rpc/agent rpc rref/lifetime rref
                               dist_autograd/graph dist_autograd/executor dist_autograd/protocol)
allow(dist_optim               base rpc/future rpc/gpu rpc rref/files rref dist_autograd/graph dist_autograd)

set(headers "")
foreach(folder IN LISTS folders)
  file(GLOB_RECURSE sources RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/${folder}/*.h" "${SOURCE_DIR}/${folder}/*.cc")
  foreach(source IN LISTS sources)
    get_filename_component(room "${source}" DIRECTORY)
    if(NOT room IN_LIST rooms)
      string(APPEND violations "${source}: ${room}/ is not in the table of house_rules\n")
      continue()
    endif()
    file(STRINGS "${SOURCE_DIR}/${source}" includes REGEX "^[ \t]*#[ \t]*include[ \t]+[<\"]")
    if(source MATCHES "\\.h$")
      list(APPEND headers "${source}")
      set("own_${source}" "")
    endif()
    foreach(include IN LISTS includes)
      if(source MATCHES "\\.h$" AND include MATCHES "[<\"]stitch/([a-z_/]+\\.h)[>\"]")
        if(NOT "${source} ${CMAKE_MATCH_1}" IN_LIST header_parts)
          list(APPEND "own_${source}" "${CMAKE_MATCH_1}")
        endif()
      endif()
      if(include MATCHES "[<\"]stitch/([a-z_/]+)/[a-z0-9_]+\\.h[>\"]")
        set(other "${CMAKE_MATCH_1}")
        if(NOT other IN_LIST "allowed_${room}")
          string(REPLACE ";" ", " allowed "${allowed_${room}}")
          string(APPEND violations "${source}: ${include}: ${room}/ may include only: ${allowed}\n")
        endif()
      elseif(include MATCHES "[<\"]stitch/")
        string(APPEND violations "${source}: ${include}: the umbrella header is for programs\n")
      elseif(include MATCHES "[<\"](torch|ATen|c10)/" AND room MATCHES "^(base|transport)")
        string(APPEND violations "${source}: ${include}: base/ and transport/ know no torch\n")
      endif()
    endforeach()
  endforeach()
endforeach()

# Headers that include nothing that is left are taken away until nothing changes: what stays is in a circle or includes one.
# Of that, headers that nothing left includes are taken away likewise: what stays is in a circle or between two.
set(left ${headers})
set(changed TRUE)
while(changed)
  set(changed FALSE)
  set(included "")
  foreach(header IN LISTS left)
    list(APPEND included ${own_${header}})
  endforeach()
  foreach(header IN LISTS left)
    set(needs "")
    foreach(other IN LISTS "own_${header}")
      if(other IN_LIST left)
        list(APPEND needs "${other}")
      endif()
    endforeach()
    set("own_${header}" ${needs})
    if(NOT needs OR NOT header IN_LIST included)
      list(REMOVE_ITEM left "${header}")
      set(changed TRUE)
    endif()
  endforeach()
endwhile()
foreach(header IN LISTS left)
  string(REPLACE ";" ", " others "${own_${header}}")
  string(APPEND violations "${header}: is in a circle of includes, with ${others}\n")
endforeach()

set(start "(^|[^A-Za-z])")
set(banned_words
  "([Nn]o|[Ss]ome|[Ee]very|[Aa]ny)body" "[Ww]hoever" "${start}[Kk]nock[a-z]*" "(give|gives|giving) way" "${start}(is|are) through"
  "for ever([^a-z]|$)" "${start}[Cc]rowd[a-z]*" "so-manie[a-z]*"
  "kPatience" "kEnough" "kSecondThoughts" "kCalm" "kAtOnce" "kMost[A-Z][A-Za-z]*")
list(JOIN banned_words "|" banned_words)

set(all_sources stitch.h)
foreach(folder IN LISTS folders outer_folders)
  file(GLOB_RECURSE sources RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/${folder}/*.h" "${SOURCE_DIR}/${folder}/*.cc")
  list(APPEND all_sources ${sources})
endforeach()
foreach(source IN LISTS all_sources)
  if(NOT EXISTS "${SOURCE_DIR}/${source}")
    continue()
  endif()
  file(STRINGS "${SOURCE_DIR}/${source}" includes REGEX "^[ \t]*#[ \t]*include[ \t]+[<\"]tensorpipe/")
  if(includes AND NOT source MATCHES "^(transport/tensorpipe/|bench/floors_tensorpipe\\.cc$)")
    string(APPEND violations "${source}: includes TensorPipe; only transport/tensorpipe/ does\n")
  endif()
  file(STRINGS "${SOURCE_DIR}/${source}" wide LENGTH_MINIMUM 101 LIMIT_COUNT 1 ENCODING UTF-8)
  if(wide)
    string(APPEND violations "${source}: has a line of more than 100 columns: ${wide}\n")
  endif()
  # Brackets and semicolons mean something in CMake lists, so lines are counted and searched as text.
  file(READ "${SOURCE_DIR}/${source}" text)
  if(text MATCHES "TORCH_VERSION" AND NOT source STREQUAL "dist_autograd/graph/compat.h")
    string(APPEND violations "${source}: asks for TORCH_VERSION; dist_autograd/graph/compat.h is the place for differences between torches\n")
  endif()
  string(REGEX REPLACE "[^\n]" "" newlines "${text}")
  string(LENGTH "${newlines}" lines)
  if(lines GREATER 400 AND NOT source MATCHES "^tests/" AND NOT text MATCHES "// One file, though long: ")
    string(APPEND violations "${source}: ${lines} lines; over 400 a comment says why: \"// One file, though long: ...\"\n")
  endif()
  string(REGEX REPLACE "\n[ \t]*(//)?[ \t]*" " " text "${text}")  # a phrase may stand on two lines
  string(REGEX MATCHALL "${banned_words}" words "${text}")
  list(REMOVE_DUPLICATES words)
  foreach(word IN LISTS words)
    string(STRIP "${word}" word)
    string(APPEND violations "${source}: says \"${word}\"; CONTRIBUTING.md has the words of the field\n")
  endforeach()
endforeach()

if(violations)
  message(FATAL_ERROR "\n${violations}")
endif()
