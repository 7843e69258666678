// What nearly every file includes and takes longest to read (a second, for the intrinsics alone): compiled once, first.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "simd.h"
