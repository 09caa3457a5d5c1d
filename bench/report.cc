#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "timing.h"

namespace stitch_bench {

namespace {

// Four digits, with an exponent only for very large and small numbers.
std::string short_number(double value) {
  char text[64];
  const double size = std::fabs(value);
  const int digits = size >= 1000 || size == 0 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

std::string exact_number(double value) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

double lowest(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}
double highest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') result += '\\';
    if (static_cast<unsigned char>(letter) >= ' ') result += letter;
  }
  return result + '"';
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("model name"))
      return line.substr(std::min(line.size(), line.find(':') + 2));
  }
  return "unknown";
}

std::string kernel_name() {
  std::ifstream release("/proc/sys/kernel/osrelease");
  std::string name;
  std::getline(release, name);
  return name;
}

std::string pad(const std::string& text, std::size_t width, bool left) {
  const std::string blanks(width > text.size() ? width - text.size() : 0, ' ');
  return left ? text + blanks : blanks + text;
}

}  // namespace

void Report::add(const std::string& line) {
  std::istringstream words(line);
  Entry read;
  double value = 0;
  if (!(words >> read.key >> value >> read.unit >> read.floor))
    throw std::runtime_error("\"" + line + "\" is not a result");
  if (read.floor == "-") read.floor.clear();
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.key == read.key; });
  Entry& entry = found == entries_.end() ? entries_.emplace_back(std::move(read)) : *found;
  entry.rounds.push_back(value);
}

const Report::Entry* Report::find(const std::string& key) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return entry.key == key; });
  return found == entries_.end() ? nullptr : &*found;
}

double Report::value(const std::string& key) const {
  const Entry* entry = find(key);
  return entry == nullptr ? 0 : median(entry->rounds);
}

std::string Report::table() const {
  std::vector<std::vector<std::string>> rows{
      {"measure", "value", "[lowest..highest]", "unit", "floor", "value/floor"}};
  for (const Entry& entry : entries_) {
    const double value = median(entry.rounds);
    const double floor = entry.floor.empty() ? 0 : this->value(entry.floor);
    rows.push_back({entry.key, short_number(value),
                    "[" + short_number(lowest(entry.rounds)) + ".." +
                        short_number(highest(entry.rounds)) + "]",
                    entry.unit, floor > 0 ? entry.floor : "",
                    floor > 0 ? short_number(value / floor) : ""});
  }
  std::vector<std::size_t> widths(rows.front().size(), 0);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t i = 0; i < row.size(); ++i)
      line += (i == 0 ? "" : "  ") + pad(row[i], widths[i], i == 0 || i == 3 || i == 4);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

std::string Report::result_lines() const {
  std::string text;
  for (const Entry& entry : entries_)
    text +=
        "RESULT " + entry.key + ' ' + exact_number(median(entry.rounds)) + ' ' + entry.unit + '\n';
  return text;
}

void Report::write_json(const std::string& file, const Settings& settings) const {
  std::ostringstream json;
  json << "{\n\"machine\": {\"processor\": " << quoted(processor_name())
       << ", \"cores\": " << std::thread::hardware_concurrency()
       << ", \"kernel\": " << quoted(kernel_name()) << "},\n"
       << "\"settings\": {\"rounds\": " << settings.rounds
       << ", \"seconds\": " << exact_number(settings.seconds)
       << ", \"pin\": " << (settings.pin ? "true" : "false")
       << ", \"tcp_transport\": " << quoted(settings.tcp_transport) << "},\n"
       << "\"results\": {";
  const char* separator = "\n";
  for (const Entry& entry : entries_) {
    json << separator << quoted(entry.key) << ": {\"unit\": " << quoted(entry.unit)
         << ", \"median\": " << exact_number(median(entry.rounds)) << ", \"rounds\": [";
    for (std::size_t i = 0; i < entry.rounds.size(); ++i)
      json << (i == 0 ? "" : ", ") << exact_number(entry.rounds[i]);
    json << "]";
    if (!entry.floor.empty()) json << ", \"floor\": " << quoted(entry.floor);
    json << "}";
    separator = ",\n";
  }
  json << "\n}\n}\n";
  std::ofstream out(file);
  if (!(out << json.str() << std::flush)) throw std::runtime_error("cannot write \"" + file + "\"");
}

}  // namespace stitch_bench
