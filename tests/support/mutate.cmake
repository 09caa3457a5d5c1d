# stitch_mutated_copy(file header output pairs...): copies a source file with deliberate mistakes built in, for a test that turns
# them on one at a time. Each pair is a text of the file and what replaces it, usually the same behind a condition broken(Mutation::name),
# which `header` declares. Sets `output` to the path of the copy. A text that does not occur exactly once stops the configuration: the mutation
# has to follow the code that it breaks.
function(stitch_mutated_copy file header output)
  set(source "${PROJECT_SOURCE_DIR}/${file}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  file(READ "${source}" text)
  math(EXPR last "${ARGC} - 1")
  foreach(at RANGE 3 ${last} 2)
    math(EXPR next "${at} + 1")
    set(right "${ARGV${at}}")
    string(FIND "${text}" "${right}" first)
    string(FIND "${text}" "${right}" only REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL only)
      message(FATAL_ERROR "mutation of ${file}: this text does not occur exactly once: ${right}")
    endif()
    string(REPLACE "${right}" "${ARGV${next}}" text "${text}")
  endforeach()
  get_filename_component(name "${file}" NAME)
  set(copy "${CMAKE_CURRENT_BINARY_DIR}/mutated/${name}")
  file(CONFIGURE OUTPUT "${copy}" CONTENT "#include \"${header}\"\n${text}" @ONLY)
  set(${output} "${copy}" PARENT_SCOPE)
endfunction()
