#pragma once

#include <string>
#include <vector>

#include "settings.h"

namespace stitch_bench {

// The numbers of all rounds, in the order of their first arrival, and their output formats. Owned
// by main(); one thread.
class Report {
 public:
  // Takes a line "key value unit floor" ("-" for no floor). Throws std::runtime_error when it is
  // not one.
  void add(const std::string& line);

  [[nodiscard]] bool empty() const { return entries_.empty(); }
  // The median of the rounds; 0 when there is no such key.
  [[nodiscard]] double value(const std::string& key) const;

  // An aligned table: measure, median round, [lowest..highest], unit, floor, ratio to it.
  [[nodiscard]] std::string table() const;
  // "RESULT key value unit" for each.
  [[nodiscard]] std::string result_lines() const;
  // Throws std::runtime_error when the file cannot be written.
  void write_json(const std::string& file, const Settings& settings) const;

 private:
  struct Entry {
    std::string key;
    std::string unit;
    std::string floor;
    std::vector<double> rounds{};
  };
  [[nodiscard]] const Entry* find(const std::string& key) const;

  std::vector<Entry> entries_;
};

}  // namespace stitch_bench
