#include "diagnose_json.h"

#include <charconv>
#include <cmath>
#include <cstdint>

namespace stitch_run {

const Json* Json::member(std::string_view name) const {
  const auto* object = std::get_if<Object>(&value);
  if (object == nullptr) return nullptr;
  const auto found = object->find(name);
  return found == object->end() ? nullptr : &found->second;
}

namespace {

constexpr int kMaxDepth = 32;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json parse() {
    Json value = parse_value(0);
    skip_space();
    if (at_ != text_.size()) fail("something after the end of the value");
    return value;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw JsonError("at byte " + std::to_string(at_) + ": " + what);
  }
  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r'))
      ++at_;
  }
  char peek() {
    skip_space();
    if (at_ == text_.size()) fail("the text ends too early");
    return text_[at_];
  }
  void expect(char wanted) {
    if (peek() != wanted) fail(std::string("a '") + wanted + "' is missing");
    ++at_;
  }
  bool take(char wanted) {
    if (peek() != wanted) return false;
    ++at_;
    return true;
  }
  bool take_word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }

  Json parse_value(int depth) {
    if (depth > kMaxDepth) fail("values are nested too deeply");
    switch (peek()) {
      case '{':
        return {parse_object(depth)};
      case '[':
        return {parse_array(depth)};
      case '"':
        return {parse_string()};
      default:
        break;
    }
    if (take_word("null")) return {};
    if (take_word("true")) return {true};
    if (take_word("false")) return {false};
    double number = 0;
    const char* const begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), number);
    if (error != std::errc() || end == begin || !std::isfinite(number))
      fail("there is no value here");
    at_ += static_cast<std::size_t>(end - begin);
    return {number};
  }

  Json::Array parse_array(int depth) {
    expect('[');
    Json::Array array;
    if (take(']')) return array;
    do array.push_back(parse_value(depth + 1));
    while (take(','));
    expect(']');
    return array;
  }

  Json::Object parse_object(int depth) {
    expect('{');
    Json::Object object;
    if (take('}')) return object;
    do {
      if (peek() != '"') fail("the name of a member is missing");
      std::string name = parse_string();
      expect(':');
      object.insert_or_assign(std::move(name), parse_value(depth + 1));
    } while (take(','));
    expect('}');
    return object;
  }

  std::string parse_string() {
    expect('"');
    std::string string;
    while (true) {
      if (at_ == text_.size()) fail("a string without an end");
      const char c = text_[at_++];
      if (c == '"') return string;
      if (static_cast<unsigned char>(c) < 0x20) fail("a control character within a string");
      if (c == '\\') {
        append_escaped(string);
      } else {
        string += c;
      }
    }
  }

  void append_escaped(std::string& string) {
    if (at_ == text_.size()) fail("a string without an end");
    const char c = text_[at_++];
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
    if (const auto found = kNames.find(c); found != std::string_view::npos) {
      string += kMeanings[found];
      return;
    }
    if (c != 'u' || at_ + 4 > text_.size()) fail("an escape that does not exist");
    std::uint32_t code = 0;
    const char* const begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, begin + 4, code, 16);
    if (error != std::errc() || end != begin + 4) fail("an escape that does not exist");
    at_ += 4;
    // What dumps escape is below 0x80; halves of pairs and the rest are not worth more.
    string += code < 0x80 ? static_cast<char>(code) : '?';
  }

  const std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace

Json parse_json(std::string_view text) { return Parser(text).parse(); }

}  // namespace stitch_run
