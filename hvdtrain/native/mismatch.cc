#include "mismatch.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

namespace hvdtrain {
namespace {

// A longer description of a mismatched collective is shortened.
constexpr size_t kShownBytes = 320;

// By rank of the job.
using Texts = std::map<int, std::string>;

// Collects the texts of the active ranks, in pieces that fit into a member. Returns the
// reason if a rank is lost.
std::string GatherTexts(Segment& segment, const std::vector<int>& active,
                        const std::string& mine, bool is_limited,
                        std::vector<std::string>* texts) {
  texts->resize(active.size());
  bool has_more = true;
  for (size_t start = 0; has_more; start += kTextBytes - 1) {
    snprintf(segment.mine().text, kTextBytes, "%s",
             start < mine.size() ? mine.c_str() + start : "");
    std::string lost = segment.Barrier("the comparison of reductions", is_limited);
    if (!lost.empty()) return lost;
    has_more = false;
    for (size_t i = 0; i < active.size(); ++i) {
      const char* const text = segment.member(active[i]).text;
      (*texts)[i] += text;
      has_more = has_more || strlen(text) == kTextBytes - 1;
    }
    // No rank may write its next text before all have read this one.
    lost = segment.Barrier("the comparison of reductions");
    if (!lost.empty()) return lost;
  }
  return "";
}

// The position of the first word, ended by a space, in which the texts differ.
size_t FirstDifference(const Texts& texts) {
  const std::string& first = texts.begin()->second;
  size_t same = 0;
  while (same < first.size() && std::all_of(texts.begin(), texts.end(),
                                            [&](const auto& text) {
                                              return text.second[same] == first[same];
                                            })) {
    ++same;
  }
  const size_t space = same == 0 ? std::string::npos : first.rfind(' ', same - 1);
  return space == std::string::npos ? 0 : space + 1;
}

// Leaves out of a long text the words before the first that differs, but for the
// beginning, and most of those after it: a model may have a thousand tensors.
std::string Shorten(const std::string& text, size_t difference) {
  if (text.size() <= kShownBytes) return text;
  size_t head = text.rfind(' ', kShownBytes / 2);
  if (head == std::string::npos || head >= difference) head = difference;
  std::string shown = text.substr(0, head);
  if (head < difference) {
    const auto words = std::count(text.begin() + head + 1, text.begin() + difference, ' ');
    shown += " (" + std::to_string(words) + " more, alike) ";
  }
  const size_t end = text.find(' ', difference + kShownBytes / 2);
  shown += text.substr(difference, end == std::string::npos ? end : end - difference);
  return end == std::string::npos ? shown : shown + " ...";
}

// A text that `Read` reads: each rank and its text, ended by zeros.
std::string Write(Segment& segment, const std::vector<int>& active,
                  const std::vector<std::string>& texts) {
  std::string written;
  for (size_t i = 0; i < active.size(); ++i) {
    written += std::to_string(segment.number(active[i])) + '\0' + texts[i] + '\0';
  }
  return written;
}

void Read(const std::string& written, Texts* texts) {
  for (size_t start = 0; start < written.size();) {
    const std::string rank = written.c_str() + start;
    const std::string text = written.c_str() + start + rank.size() + 1;
    (*texts)[std::stoi(rank)] = text;
    start += rank.size() + text.size() + 2;
  }
}

// The calls of all ranks, which `Write` has written for each host.
std::string Compare(const std::vector<std::string>& written) {
  Texts texts;
  for (const std::string& each : written) Read(each, &texts);
  const size_t difference = FirstDifference(texts);
  std::string text;
  for (const auto& [rank, sent] : texts) {
    text += (text.empty() ? "rank " : "; rank ") + std::to_string(rank) + ": " +
            Shorten(sent, difference);
  }
  return text;
}

}  // namespace

std::string DescribeMismatch(Segment& segment, Hosts& hosts,
                             const std::vector<int>& active, const std::string& mine,
                             std::string* text) {
  std::vector<std::string> own;
  std::string lost = GatherTexts(segment, active, mine, true, &own);
  if (!lost.empty()) return lost;
  const bool is_connected = segment.rank() < segment.parts();
  if (is_connected) {
    std::vector<std::string> written;
    lost = hosts.ExchangeTexts(Write(segment, active, own), &written);
    if (!lost.empty()) return lost;
    *text = Compare(written);
  }
  if (segment.parts() == segment.size()) return "";
  // Ranks without links get the text of the first rank of their host.
  std::vector<std::string> published;
  lost = GatherTexts(segment, {0}, *text, is_connected, &published);
  *text = published[0];
  return lost;
}

}  // namespace hvdtrain
