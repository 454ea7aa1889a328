/** Commands that more than one page shows. */

/** Shows the newest lines of one rank. */
export const logsCommand = (job: string, rank = 0): string => `everstep jobs logs ${job} --rank ${rank} --tail 50`

export const FIRST_COMMAND =
  'everstep jobs submit --name gpt --source-dir examples/char_gpt --entry-point train.py --node-count 4'
