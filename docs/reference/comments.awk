# Doxygen reads this project's headers through this filter (cmake/StitchReference.cmake). In the headers plain comments document what
# they stand before, or behind on the same line. The filter gives them Doxygen's marks, line by line, so that line numbers stay:
#
#   * A comment right before a declaration becomes `///`, one behind a field or enumerator `///<`. Comments with a blank line
#     after them, and those in function bodies, stay as they are.
#   * The comment of a function speaks for the overloads right after it: for those it is repeated.
#   * Friends, deleted and defaulted functions and serialize() are hidden where they have no comment of their own.
#   * What Doxygen would take for commands or tags (`rpc_sync<f>`, `12@0.1`) is escaped.

# Escapes what is special in Doxygen's text, outside of `code` and "quotes".
function escaped(text,    result, inside, i, c) {
  result = ""
  inside = 0
  for (i = 1; i <= length(text); ++i) {
    c = substr(text, i, 1)
    if (c == "`" || c == "\"") inside = !inside
    if (!inside && index("<>@&#\\", c) > 0) result = result "\\"
    result = result c
  }
  return result
}

# "  // text" -> "  /// text"; mark is "///" or "///<". Text that is indented further is code and stays as it is.
function marked(line, mark,    at, text) {
  at = index(line, "//")
  text = substr(line, at + 2)
  if (text ~ /^    */ && mark == "///") return substr(line, 1, at - 1) mark "  " text
  return substr(line, 1, at - 1) mark escaped(text)
}

function no_comment(text) { return text ~ /NOLINT|IWYU|clang-format|^ namespace / }

# The name of the function that a statement declares, "" when it declares none.
function function_name(text,    at, name, i, c, open) {
  while ((at = index(text, "(")) > 0) {
    name = substr(text, 1, at - 1)
    sub(/[ \t]+$/, "", name)
    sub(/^.*[^A-Za-z0-9_~]/, "", name)
    if (name != "requires" && name != "decltype" && name != "explicit") return name
    # What follows is a condition: after its closing parenthesis comes more.
    open = 0
    for (i = at; i <= length(text); ++i) {
      c = substr(text, i, 1)
      if (c == "(") ++open
      if (c == ")" && --open == 0) break
    }
    text = substr(text, i + 1)
  }
  return ""
}

# What kind of block the statement before a "{" opens.
function kind_of(statement) {
  gsub(/template <[^>]*>/, "", statement)
  if (statement ~ /(^|[ \t])enum[ \t]/) return "enum"
  if (statement ~ /(^|[ \t])(namespace|class|struct|union)([ \t]|$)/ && statement !~ /\)[ \t]*$/) return "scope"
  return "body"
}

# The comments collected, as documentation or as they are; the statement collected, with or without a repeated comment.
function flush_comments(as_documentation,    i) {
  if (comments == 0) return
  if (as_documentation) {
    documentation = ""
    for (i = 1; i <= comments; ++i) {
      documentation = documentation " " escaped(substr(comment[i], index(comment[i], "//") + 2))
      print marked(comment[i], "///")
    }
  } else {
    for (i = 1; i <= comments; ++i) print comment[i]
  }
  comments = 0
}
function flush_statement(    i, text, name, prefix, suffix) {
  if (lines == 0) return
  text = ""
  for (i = 1; i <= lines; ++i) text = text " " line_of[i]
  name = function_name(text)
  prefix = ""
  suffix = ""
  if (!own_documentation && !behind && text !~ /^[ \t]*(public|private|protected):[ \t]*$/ && text !~ /^[ \t}]*;?[ \t]*$/) {
    if (text ~ /^[ \t]*(friend |template <[^>]*> *friend )|= (delete|default);|void serialize\(/) {
      prefix = "/** @cond */ "
      suffix = " /** @endcond */"
    } else if (documentation != "" && name != "" && name == documented_name && first_depth == documented_depth) {
      prefix = "/**" documentation " */ "
    }
  }
  if (own_documentation) {
    documented_name = name
    documented_depth = first_depth
  }
  for (i = 1; i <= lines; ++i) print (i == 1 ? prefix : "") line_of[i] (i == lines ? suffix : "")
  lines = 0
  if (opens_scope) documentation = ""
}

function start_statement() {
  own_documentation = (comments > 0)
  flush_comments(1)
  first_depth = depth
  behind = 0
  opens_scope = 0
}

BEGIN {
  depth = 0
  kind[0] = "scope"
  statement = ""
  parentheses = 0
}

FNR == 2 && $0 == "" { print "/** @file */"; next }

# Directives, with their continuation lines.
in_directive || (/^[ \t]*#/ && statement == "") {
  if (!in_directive) flush_comments(/^#define/)
  print
  in_directive = /\\$/
  documentation = ""
  next
}

/^[ \t]*$/ {
  if (lines > 0) {
    line_of[++lines] = $0
  } else {
    flush_comments(0)
    documentation = ""
    print
  }
  comment_column = 0
  next
}

# Comments on lines of their own.
/^[ \t]*\/\// {
  column = index($0, "//")
  if (comment_column > 0 && column == comment_column) {
    if (lines > 0) line_of[++lines] = marked($0, "///<"); else print marked($0, "///<")
  } else if (lines > 0 || kind[depth] == "body" || no_comment(substr($0, column + 2))) {
    if (lines > 0) line_of[++lines] = $0; else print
  } else {
    comment[++comments] = $0
    comment_column = 0
  }
  next
}

{
  if (lines == 0 && kind[depth] != "body") start_statement()
  line = $0
  comment_column = 0
  ended = 0
  in_string = ""
  for (i = 1; i <= length(line); ++i) {
    c = substr(line, i, 1)
    if (in_string != "") {
      if (c == "\\") ++i
      else if (c == in_string) in_string = ""
      continue
    }
    if (c == "/" && substr(line, i + 1, 1) == "/") {
      text = substr(line, i + 2)
      if (kind[depth] != "body" && !no_comment(text) && substr(line, 1, i - 1) !~ /^[ \t}]*;?[ \t]*$/ && !opens_scope) {
        comment_column = i
        behind = 1
        line = substr(line, 1, i - 1) marked(substr(line, i), "///<")
      }
      break
    }
    if (c == "\"" || (c == "'" && substr(line, i - 1, 1) !~ /[0-9]/)) { in_string = c; continue }
    if (c == "(") ++parentheses
    if (c == ")") --parentheses
    if (c == "{") {
      opened = parentheses > 0 || kind[depth] == "body" ? "body" : kind_of(statement)
      # A body that initializes something does not end its statement.
      initializes = statement
      gsub(/template <[^>]*>/, "", initializes)
      gsub(/operator[-+*\/=<>!&|]+/, "", initializes)
      while (gsub(/\([^()]*\)/, "", initializes) > 0) {
      }
      kind[++depth] = opened
      saved_statement[depth] = statement
      saved_parentheses[depth] = parentheses
      continues[depth] = opened == "body" && (kind[depth - 1] == "body" || initializes ~ /=[^=]*$/ || parentheses > 0)
      if (opened != "body") opens_scope = 1
      statement = ""
      parentheses = 0
      if (opened != "body") ended = 1
      continue
    }
    if (c == "}") {
      statement = saved_statement[depth]
      parentheses = saved_parentheses[depth]
      was = kind[depth]
      goes_on = continues[depth]
      if (depth > 0) --depth
      rest = substr(line, i + 1)
      sub(/\/\/.*$/, "", rest)
      if (was != "body") {
        statement = ""
        ended = 1
      } else if (kind[depth] != "body" && !goes_on && rest ~ /^[ \t]*$/) {
        statement = ""
        ended = 1
      }
      continue
    }
    if (kind[depth] != "body" && parentheses == 0 && (c == ";" || (c == "," && kind[depth] == "enum"))) {
      statement = ""
      ended = 1
      continue
    }
    if (kind[depth] != "body" && line ~ /^[ \t]*(public|private|protected):[ \t]*$/) { ended = 1; break }
    statement = statement c
  }
  if (statement != "") statement = statement " "
  if (statement ~ /^[ \t]*$/) statement = ""
  line_of[++lines] = line
  if (ended && statement == "") flush_statement()
}

END {
  flush_statement()
  flush_comments(0)
}
