#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace stitch_run {

// One row of a table of a dump. Refers to its table.
class DumpRow {
 public:
  using Cells = nlohmann::json::array_t;
  DumpRow(const std::vector<std::string>& columns, const Cells& cells)
      : columns_(&columns), cells_(&cells) {}
  // The text of a column, without control characters, cut to a readable length; empty if the row
  // has none.
  [[nodiscard]] std::string text(std::string_view column) const;
  // The number; 0 if the row has none.
  [[nodiscard]] double number(std::string_view column) const;
  [[nodiscard]] bool has(std::string_view column) const;

 private:
  [[nodiscard]] const nlohmann::json* find(std::string_view column) const;
  const std::vector<std::string>* columns_;
  const Cells* cells_;
};

// What one worker wrote about itself (rpc/agent/dumps.h), checked.
class Dump {
 public:
  std::string file;
  std::string name;
  double id = 0;
  double epoch = 0;
  std::string world;  // its number, equal in all dumps of one run; empty in those of older versions
  long pid = 0;
  std::string host;
  std::string reason;
  double time = 0;  // seconds since 1970
  // The rows of a table; none if the dump has no such table.
  [[nodiscard]] std::vector<DumpRow> rows(std::string_view table) const;

 private:
  friend Dump read_dump(const std::filesystem::path& file);
  struct Table {
    std::vector<std::string> columns;
    std::vector<DumpRow::Cells> rows;
  };
  std::map<std::string, Table, std::less<>> tables_;
};

// Throws std::runtime_error saying what is wrong with the file.
[[nodiscard]] Dump read_dump(const std::filesystem::path& file);

// The dumps of one run in a folder, the one of the newest dump: of each worker the newest of its
// highest epoch. A worker that others know with a higher epoch has none: its dumps are of a process
// that is no more.
struct Dumps {
  std::map<std::string, Dump, std::less<>> by_worker;
  std::vector<std::string> left_out;      // files that cannot be read, and why
  std::vector<std::string> former_lives;  // dumps of such workers, a line for each
  std::vector<std::string> other_runs;    // what the folder has of others, a line for each
  [[nodiscard]] const Dump* find(std::string_view worker) const;
};
// Throws std::runtime_error for what is no folder, or holds no dump that can be read.
[[nodiscard]] Dumps read_dumps(const std::filesystem::path& folder);

// `text` without control characters, and not too long to be read.
[[nodiscard]] std::string readable(std::string_view text);

}  // namespace stitch_run
