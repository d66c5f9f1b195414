# The commands of ./run, for those who type make.
.PHONY: install generate test check
install generate test check:
	./run $@
