#pragma once
#include "../../../../acl/acl_base.h"
