/** Texts of the dialogs and buttons that change something. */
export const DIALOGS = {
  close: 'Close',
  cancel: 'Cancel',
  failed: 'The action failed',
  question: (verb: string, name: string) => `${verb} ${name}?`,
  confirm: (name: string) => `Type ${name} to confirm`,
} as const
