// A vector with an element for each id from 0 on, indexed by that id's type and no other.
// Not checked: that an id is below size(), as with std::vector.
#pragma once

#include <cstddef>
#include <vector>

namespace lockstep {

// Id: an enum class of base/ids.h.
template <class Id, class T>
class IdVector : private std::vector<T> {
  using Base = std::vector<T>;

 public:
  using Base::assign;
  using Base::Base;
  using Base::begin;
  using Base::emplace_back;
  using Base::empty;
  using Base::end;
  using Base::push_back;
  using Base::resize;
  using Base::size;

  T& operator[](Id id) { return Base::operator[](static_cast<std::size_t>(id)); }
  const T& operator[](Id id) const { return Base::operator[](static_cast<std::size_t>(id)); }
};

}  // namespace lockstep
