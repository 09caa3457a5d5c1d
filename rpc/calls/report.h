#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

// What a worker says about itself, as tables: one source for dumps and for whatever shows it.
// Plain values. Thread contract: none.
namespace stitch::rpc {

// One value; monostate where there is none.
struct Cell {
  // Not a plain std::string: libstdc++ 12 takes a variant of such for one that cannot become
  // valueless, and then destroys what was never built when there is no memory for its copy.
  struct Text {
    std::string text;
  };
  std::variant<std::monostate, Text, std::int64_t, double, std::chrono::nanoseconds> value;

  Cell() = default;
  Cell(std::string text) : value(Text{std::move(text)}) {}         // NOLINT: a value
  Cell(std::string_view text) : value(Text{std::string(text)}) {}  // NOLINT: a value
  Cell(const char* text) : value(Text{std::string(text)}) {}       // NOLINT: a value
  Cell(std::chrono::nanoseconds duration) : value(duration) {}     // NOLINT: a value
  Cell(double number) : value(number) {}                           // NOLINT: a value
  template <class Integer>
  requires std::is_integral_v<Integer> Cell(Integer number)  // NOLINT: a value
      : value(static_cast<std::int64_t>(number)) {}
};

// Rows of named columns, the oldest first.
struct Table {
  static constexpr std::size_t kMaxRows = 1000;
  std::string name;
  std::vector<std::string> columns;
  std::vector<std::vector<Cell>> rows{};
  std::size_t left_out = 0;  // rows that would have been more than kMaxRows

  // Adds a row, or counts it as left out.
  void add(std::vector<Cell> row) {
    if (rows.size() < kMaxRows) {
      rows.push_back(std::move(row));
    } else {
      ++left_out;
    }
  }
};

// What a table is about.
enum class Page : std::uint8_t { status, calls, rrefs, contexts, groups, events };
inline constexpr Page kAllPages[] = {Page::status,   Page::calls,  Page::rrefs,
                                     Page::contexts, Page::groups, Page::events};
using Report = std::vector<Table>;

// Appends `text` in quotes, as JSON writes it. Bytes that are no UTF-8 become question marks.
void append_json(std::string& json, std::string_view text);
// Appends a table as {"name": ..., "columns": [...], "rows": [[...], ...], "left_out": 0};
// durations are numbers of seconds.
void append_json(std::string& json, const Table& table);

}  // namespace stitch::rpc
