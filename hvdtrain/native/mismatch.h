// What the ranks have called, where it is not the same.

#ifndef HVDTRAIN_MISMATCH_H_
#define HVDTRAIN_MISMATCH_H_

#include <string>
#include <vector>

#include "hosts.h"
#include "segment.h"

namespace hvdtrain {

// Writes what each active rank of the job has called, the same text on every rank.
// `active` are the active ranks of this host, `mine` is the description of this rank's
// call. Every rank must call it. Returns the reason if a rank is lost.
std::string DescribeMismatch(Segment& segment, Hosts& hosts,
                             const std::vector<int>& active, const std::string& mine,
                             std::string* text);

}  // namespace hvdtrain

#endif  // HVDTRAIN_MISMATCH_H_
