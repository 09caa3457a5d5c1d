#include "stitch/rpc/calls/report.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <iterator>

namespace stitch::rpc {

namespace {

// The length of the UTF-8 sequence at the beginning of `text`; 0 if there is none.
std::size_t sequence_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const std::size_t length = byte(0) < 0x80                       ? 1
                             : byte(0) >= 0xc2 && byte(0) <= 0xdf ? 2
                             : byte(0) >= 0xe0 && byte(0) <= 0xef ? 3
                             : byte(0) >= 0xf0 && byte(0) <= 0xf4 ? 4
                                                                  : 0;
  if (length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  return length;
}

void append_number(std::string& json, double number) {
  if (!std::isfinite(number)) {
    json += "null";
    return;
  }
  char text[40];  // not by printf: a locale may have another decimal point than JSON
  const auto end =
      std::to_chars(std::begin(text), std::end(text), number, std::chars_format::general, 9).ptr;
  json.append(std::begin(text), end);
}

void append_cell(std::string& json, const Cell& cell) {
  if (const auto* text = std::get_if<Cell::Text>(&cell.value)) {
    append_json(json, text->text);
  } else if (const auto* integer = std::get_if<std::int64_t>(&cell.value)) {
    json += std::to_string(*integer);
  } else if (const auto* number = std::get_if<double>(&cell.value)) {
    append_number(json, *number);
  } else if (const auto* duration = std::get_if<std::chrono::nanoseconds>(&cell.value)) {
    append_number(json, std::chrono::duration<double>(*duration).count());
  } else {
    json += "null";
  }
}

}  // namespace

void append_json(std::string& json, std::string_view text) {
  json += '"';
  while (!text.empty()) {
    const std::size_t length = sequence_length(text);
    const char first = text.front();
    if (length == 0) {
      json += '?';
    } else if (first == '"' || first == '\\') {
      json += '\\';
      json += first;
    } else if (length == 1 && (static_cast<unsigned char>(first) < 0x20 || first == 0x7f)) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(first));
      json += escape;
    } else {
      json += text.substr(0, length);
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  json += '"';
}

void append_json(std::string& json, const Table& table) {
  json += "{\"name\": ";
  append_json(json, table.name);
  json += ", \"columns\": [";
  for (std::size_t i = 0; i < table.columns.size(); ++i) {
    if (i > 0) json += ", ";
    append_json(json, table.columns[i]);
  }
  json += "], \"rows\": [";
  for (std::size_t i = 0; i < table.rows.size(); ++i) {
    json += i > 0 ? ",\n    [" : "\n    [";
    for (std::size_t j = 0; j < table.rows[i].size(); ++j) {
      if (j > 0) json += ", ";
      append_cell(json, table.rows[i][j]);
    }
    json += ']';
  }
  json += "], \"left_out\": " + std::to_string(table.left_out) + "}";
}

}  // namespace stitch::rpc
