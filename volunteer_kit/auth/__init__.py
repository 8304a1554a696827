"""Who a volunteer is: his login at the Hugging Face Hub, found or asked for, and checked."""
