# Completion of rallyrun and rallyctl for fish 3.1 and newer, made by 'rallyctl completion fish'.

# The command of this line, "rallyrun" or a verb of rallyctl, then the words before the cursor that are no flags of it.
# A script, or the command of `rallyctl launch`, is the last of them, and what follows it is left as it is.
function __rallypoint_line
    set -l words (commandline -opc)
    set -l command (string replace -r '.*/' '' -- $words[1])
    set -l index 2
    if test $command = rallyctl
        test (count $words) -gt 1; or return
        set command $words[2]
        set index 3
    end
    echo $command
    set -l valued __rallypoint_valued_$command
    set -l skips no
    set -l ended no
    for word in $words[$index..]
        if test $skips = yes
            set skips no
        else if test $ended = no; and test "$word" = --
            set ended yes
        else if test $ended = no; and string match -q -- '-?*' "$word"
            string match -q -- '*=*' "$word"; and continue
            # One that takes a value, also where it is abbreviated.
            set -l flag (string replace -a _ - -- "$word")
            string match -q -- '--*' $flag; and set flag "$flag*"
            string match -q -- $flag $$valued; and set skips yes
        else
            printf '%s\n' "$word"
            contains $command rallyrun launch; and break
        end
    end
end

# Whether this line is of the command $argv[1], and has $argv[2] words that are no flags (any number without that).
function __rallypoint_at
    set -l line (__rallypoint_line)
    test "$line[1]" = "$argv[1]"; or return 1
    test (count $argv) -eq 1; or test (math (count $line) - 1) -eq $argv[2]
end

function __rallypoint_needs_verb
    test (count (commandline -opc)) -eq 1
end

# Whether flags are written as torchrun writes them.
function __rallypoint_underscores
    commandline -pc | string match -qr -- '--\w+_'
end

# What has been typed of a value.
function __rallypoint_typed
    commandline -ct | string replace -r -- '^--[^=]*=' ''
end

# What can stand for a value: names of kind $argv[1], several with $argv[2] between them, and the words that follow.
function __rallypoint_value
    set -l kind $argv[1]
    set -l separator $argv[2]
    set -l typed (__rallypoint_typed)
    set -l before ''
    test -n "$separator"; and set before (string match -r -- ".*$separator" "$typed")
    if string match -q -- 'jsonl:*' "$typed"
        set before jsonl:
        set typed (string replace jsonl: '' -- $typed)
        set kind file
    end
    for each in $argv[3..]
        echo "$before$each"
    end
    switch $kind
        case file
            __rallypoint_files "$typed" | string replace -r -- '^' "$before"
        case folder
            __rallypoint_files "$typed" | string match -r -- '^[^\t]*/(?=\t|$)'
        case host
            __rallypoint_hosts | string replace -r -- '^' "$before"
        case variable
            set --names -x
        case interface
            for each in /sys/class/net/*
                echo "$before"(string replace -r '.*/' '' $each)
            end
        case program
            __rallypoint_programs "$typed"
        case script
            __rallypoint_scripts "$typed"
    end
end

function __rallypoint_files
    complete -C "'' $argv[1]"
end

# Programs, of which there are too many to name where nothing has been typed.
function __rallypoint_programs
    string match -q -- '-*' "$argv[1]"; or test -z "$argv[1]"; or complete -C "$argv[1]"
end

function __rallypoint_scripts
    set -l words (commandline -opc)
    if contains -- -m $words; or contains -- --module $words
        # Modules below this folder, as python -m takes them.
        for each in (__rallypoint_files (string replace -a . / -- $argv[1]) | string replace -r '\t.*' '')
            if string match -qr -- '(^|/)[^._][^/]*/$' $each; or string match -q -- '*.py' $each
                string replace -r -- '\.py$' '' $each | string replace -a / .
            end
        end
    else if contains -- --no-python $words
        __rallypoint_programs "$argv[1]"
    else
        __rallypoint_files "$argv[1]" | string match -r -- '^[^\t]*(?:/|\.py)(?=\t|$)'
    end
end

# Hosts: those of --hosts or --hostfile of this line, else of files that have hostfiles' names, and those fish knows.
function __rallypoint_hosts
    set -l hosts (__rallypoint_given --hosts)
    set -l hostfile (__rallypoint_given --hostfile)
    set -l lines
    if test -n "$hosts"
        set lines (string split , -- $hosts)
    else if test -n "$hostfile"
        set lines (cat (string replace -r -- '^~/' "$HOME/" $hostfile) 2>/dev/null)
    else
        for file in hostfile hostfile.* *.hostfile hosts hosts.txt /job/hostfile
            test -f $file; and set lines $lines (cat $file 2>/dev/null)
        end
        __fish_print_hostnames
    end
    # The first word of each line, without a number of slots.
    for each in (string replace -r -- '[\s#].*' '' $lines | string replace -r -- '^(\[.*\]|[^:]*):\d+$' '$1')
        test -n "$each"; and echo $each
    end
end

# The value of the flag $argv[1], where this line gives it.
function __rallypoint_given
    set -l words (commandline -opc)
    set -l value (string replace -rf -- "^$argv[1]=" '' $words)
    set -l index (contains -i -- $argv[1] $words); and set value $words[(math $index + 1)]
    echo $value[1]
end

# The command that `rallyctl launch` runs, by its own completion.
function __rallypoint_command
    set -l words (commandline -opc)
    set -l line (__rallypoint_line)
    if test (count $line) -eq 1
        echo rallyrun
        __rallypoint_programs (commandline -ct)
        return
    end
    set -l start (contains -i -- $line[2] $words[3..])
    complete -C (string join ' ' -- (string escape -- $words[(math $start + 2)..]) (commandline -ct))
end

#TABLES
